"""What a model needs of each rank's memory: sharded weights (FSDP2), activations that are recomputed.

Sharded, each rank holds 1/world_size of weights, gradients and AdamW moments (ZeRO stage 3).
`torch.distributed.fsdp.fully_shard` turns every parameter into a DTensor of which a rank keeps a slice along the first
dimension (of routed experts [E, F, D]: some experts). A residual block is gathered before its forward and again before
its backward pass, and its gradients are summed and scattered after it, while the next block computes. Model and loop
stay as they are: no wrapper, same parameter names. Ranks that share a model must call it equally often.

FSDP and DTensor are imported where they are used: that takes 0.6 s, and most runs do not shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nemotron.stack.models import NemotronH
from nemotron.stack.models.moe import Router
from nemotron.stack.training.distributed import Ranks, full_tensor, is_sharded
from nemotron.stack.training.lora import add_lora_like

if TYPE_CHECKING:
    from nemotron.kit.schemas.training import TrainedModelConfig

# Kinds of blocks in Megatron-Core's `recompute_modules`, and their symbols in `hybrid_override_pattern`.
SYMBOLS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def place_model(model: NemotronH, ranks: Ranks, cfg: TrainedModelConfig, shard: bool, bf16: bool) -> None:
    """Bring `model` to the device of this rank, sharded if asked for, and choose what its backward pass recomputes.

    Call it before the optimiser is built, with the same weights on every rank. `bf16` as in `shard_model`.
    """
    if shard:
        shard_model(model, ranks, bf16)
    model.to(ranks.device)
    recompute_activations(model, cfg.recompute_granularity, cfg.recompute_modules)


def recompute_activations(
    model: NemotronH, granularity: Literal["full", "selective"] | None, modules: Iterable[str] = ("mamba",)
) -> None:
    """Choose the blocks that keep their input only, and are computed again for their gradient (Chen et al. 2016).

    A third more arithmetic for much less memory. Results stay the same to the bit: the second pass does what the first
    did.

    Args:
        granularity: "full" every block, "selective" those of the kinds in `modules`, None none.
        modules: of `SYMBOLS`: mamba, attention, moe, mlp. ValueError for another.
    """
    if unknown := sorted(set(modules) - set(SYMBOLS)):
        raise ValueError(f"recompute_modules {unknown}: {', '.join(SYMBOLS)} expected")
    chosen = {None: "", "full": "M*E-", "selective": "".join(SYMBOLS[name] for name in modules)}[granularity]
    symbols, blocks = model.config.hybrid_override_pattern, model.blocks()
    if model.mtp is not None:
        symbols, blocks = symbols + model.config.mtp_hybrid_override_pattern, [*blocks, *model.mtp.blocks()]
    for symbol, block in zip(symbols, blocks, strict=True):
        block.recompute = symbol in chosen


def shard_model(model: NemotronH, ranks: Ranks, bf16: bool) -> None:
    """Shard `model` over all ranks, in place: block by block, multi-token prediction as one, then embedding and head.

    Call it before the optimiser is built, with the same weights on every rank (CPU or GPU: slices move to
    `ranks.device`). With one process there is nothing to share, and nothing happens.

    Args:
        bf16: gather the matrices of blocks as bf16, for a forward pass under bf16 autocast. That would round them
            anyway, but keep its rounded copies until the backward pass, those of all blocks at once. Gradients are
            still summed in fp32, and what must not be rounded (A_log, dt_bias, norms, router) travels as fp32.
    """
    if ranks.world_size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # Inputs are cast by autocast, not by FSDP: routing weights stay fp32.
    rounded = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    for block in model.blocks():
        if bf16:
            fully_shard(list(matrix_modules(block)), mesh=mesh, mp_policy=rounded)
        fully_shard(block, mesh=mesh, mp_policy=exact)
    if model.mtp is not None:
        fully_shard(model.mtp, mesh=mesh, mp_policy=exact)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loss is divided by the tokens of the global batch already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def matrix_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of a block that hold nothing but weights of matrix products, the router's not included."""
    weights = list(module.parameters())
    has_router = any(isinstance(part, Router) for part in module.modules())  # bf16 scores would swap experts
    if weights and all(weight.dim() >= 2 for weight in weights) and not has_router:
        yield module
    else:
        for child in module.children():
            yield from matrix_modules(child)


def sync_gradients_in_backward(model: Any, sync: bool) -> None:
    """Whether the next backward pass sums a sharded model's gradients over ranks: only in a step's last micro-batch.

    Until then they add up on each rank. Without effect on a model that is not sharded: `sum_gradients` does it there.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)


def reshard_parameters(model: Any) -> None:
    """Make the parameters of a sharded model those that its optimiser knows: a forward pass without a gradient leaves
    the root's whole. Without effect on a model that is not sharded."""
    if hasattr(model, "reshard"):
        model.reshard()


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`whole` on the device of `like`, and sharded as `like` is; every rank has all of it, so nothing is sent."""
    if not is_sharded(like):
        return whole.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(whole.to(like.to_local().device), like.device_mesh, like.placements, src_data_rank=None)


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict without frozen parameters: what training changes, buffers included."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def whole_weights(model: nn.Module, ranks: Ranks, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """A copy of the model's state dict in CPU memory, whole tensors, on rank 0; all ranks call it, others get {}.

    `trained_only`: without frozen parameters.
    """
    weights = {}
    for name, tensor in (trained_state(model) if trained_only else model.state_dict()).items():
        whole = full_tensor(tensor.detach())
        if ranks.is_main:
            weights[name] = whole.cpu().clone()
    return weights


def whole_model(model: NemotronH, ranks: Ranks) -> NemotronH:
    """For saving and evaluating it on rank 0: an unsharded copy of a sharded model; `model` itself where it is whole.

    All ranks call it, before `stop_distributed`; the others get `model` back.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return model
    weights = whole_weights(model, ranks)
    if not ranks.is_main:
        return model
    copy = NemotronH(model.config).to(ranks.device)
    add_lora_like(copy, model)
    copy.load_state_dict(weights)
    return copy
