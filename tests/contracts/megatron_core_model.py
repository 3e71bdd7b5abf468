"""Names and shapes of Megatron-Core's own hybrid model, on the meta device. A program: it changes what it imports.

    python tests/contracts/megatron_core_model.py FOLDER_OF_WHEEL '{"pattern": "M*E", "vocab_size": 64, "config": {…}}'

Where the library wants a GPU to be imported or to be built, it gets something of the same shapes: the kernels of Mamba
and of paged stashes, which no constructor calls, Transformer Engine's RMSNorm and plain matrix, Mamba's gated norm, the
state of the GPU's random numbers. All else is its code: HybridModel and its stack, attention, MambaMixer, MoE, latent
projections, MTP.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class GatedNorm(torch.nn.Module):
    """What Mamba's kernels bring for a norm: one weight a channel."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))


class Linear(torch.nn.Linear):
    """Transformer Engine's, for what no GPU shares with another: the latent projections."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=bias)


def shapes(wheel: str, pattern: str, vocab_size: int, config: dict[str, Any]) -> dict[str, list[int]]:
    """Of all parameters, and of the buffers that are saved."""
    sys.path.insert(0, wheel)
    stash = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    stash.__dict__["__getattr__"] = lambda name: None
    sys.modules[stash.__name__] = stash
    sys.modules["einops"] = einops = ModuleType("einops")
    einops.__dict__.update(rearrange=None, repeat=None)

    core = SimpleNamespace(
        **{
            name.rpartition(".")[2]: importlib.import_module(f"megatron.core.{name}")
            for name in (
                "activations", "parallel_state", "models.hybrid.hybrid_block", "models.hybrid.hybrid_model",
                "post_training.modelopt.hybrid.model_specs", "ssm.mamba_mixer", "transformer.moe.moe_layer",
                "transformer.torch_norm", "transformer.transformer_config",
            )
        }
    )  # fmt: skip
    norm = core.torch_norm.WrappedTorchNorm
    core.model_specs.Norm = core.hybrid_block.TENorm = norm
    mixer = core.mamba_mixer
    mixer.HAVE_MAMBA_SSM, mixer.ExtendedRMSNorm = True, GatedNorm
    core.moe_layer.HAVE_TE, core.moe_layer.TELinear = True, Linear
    mixer.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=contextlib.nullcontext)
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]

    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        core.parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        settings = core.transformer_config.TransformerConfig(
            **config, activation_func=core.activations.squared_relu, normalization="RMSNorm",
            use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = core.hybrid_model.HybridModel(
                settings, core.model_specs.get_hybrid_stack_modelopt_spec(local_core_attention=True),
                vocab_size=vocab_size, max_sequence_length=8192, hybrid_layer_pattern=pattern,
                position_embedding_type="none", share_embeddings_and_output_weights=False,
            )  # fmt: skip
        torch.distributed.destroy_process_group()
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(shapes(sys.argv[1], **json.loads(sys.argv[2]))))
