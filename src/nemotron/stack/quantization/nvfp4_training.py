"""NVFP4 training as published for Nemotron 3 Super (arXiv 2604.12374, 2.2; the method is arXiv 2509.25149), emulated.

The three products of a linear layer take NVFP4 values: E2M1, with an E4M3 scale a block and an fp32 scale a tensor.

    y  = x W^T              x in blocks of 16 along K                     W in blocks of 16x16
    dx = dy W               dy in blocks of 16 along N, stochastic        W in blocks of 16x16, the same values
    dW = (H dy)^T (H x)     H dy in blocks of 16 along T, stochastic      H x in blocks of 16 along T

Square blocks make W and W^T the same values, so that the gradient is that of the function that was computed. H rotates
groups of 16 tokens by a Hadamard matrix with random signs: it is orthogonal, so nothing changes in exact arithmetic,
but what one token has of an outlier is spread over 16 values. Stochastic rounding takes one of the two neighbours, with
probabilities that make the mean exact; to nearest, whatever is below a quarter of its block's scale would be 0 in every
step. x and W are rounded to nearest. Sums are fp32; weights and optimiser stay fp32.

Layers that the recipe keeps in MXFP8 have blocks of 32 along what the product sums over, all rounded to nearest.

Every random number follows from the run's seed, the rank, the step, the micro-batch, the layer and the product. So a
run that was stopped draws what it would have drawn, and activations that are computed again change nothing.

Shapes: T tokens, K inputs, N outputs; D, F, K and S of the routed experts as in `moe.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron.kit.schemas.architecture import nvfp4_layers
from nemotron.kit.schemas.training import LinearPrecision, QuantRecipe
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.kernels.experts import dispatch, weighted_sum
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.models.layers import at_least_fp32, squared_relu
from nemotron.stack.models.moe import Experts
from nemotron.stack.quantization import mx, nvfp4
from nemotron.stack.quantization.fp8 import fp32_product

# Random, but the same for all layers and steps: Transformer Engine's `get_wgrad_sign_vector`.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
# Orthogonal, [16, 16]: sign_i (-1)^(number of ones that i and j have in common, in binary) / 4.
HADAMARD = torch.tensor([[sign * (-1) ** (i & j).bit_count() / 4 for j in range(16)] for i, sign in enumerate(SIGNS)])
# Which line of the recipe decides about a part of a mixer.
KINDS = {
    "in_proj": "in_proj", "out_proj": "out_proj",
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "o_proj": "o_proj",
    "fc1_latent_proj": "latent_proj", "fc2_latent_proj": "latent_proj", "experts": "experts",
    "shared_experts.up_proj": "shared_experts", "shared_experts.down_proj": "shared_experts",
    "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


@dataclass
class Nvfp4Run:
    """What a model's layers share: where random numbers come from, and what Transformer Engine's recipe can disable.

    The loop says with `begin` which micro-batch the next backward pass is of. Ranks have tokens of their own, and so
    random numbers of their own.
    """

    seed: int
    rank: int = 0
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    step: int = 0
    micro_batch: int = 0

    def begin(self, step: int, micro_batch: int) -> None:
        """Gradients are those of this micro-batch from here on."""
        self.step, self.micro_batch = step, micro_batch

    def generator(self, layer: str, product: Literal["dx", "dw"], device: torch.device) -> torch.Generator | None:
        """For rounding the gradient in a product of a layer; None where rounding is to nearest."""
        if self.disable_stochastic_rounding:
            return None
        key = f"{self.seed} {self.rank} {self.step} {self.micro_batch} {layer} {product}"
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
        return torch.Generator(device).manual_seed(number >> 1)  # seeds have 63 bits


@dataclass(frozen=True)
class Layer:
    """A weight matrix as the products see it. name: that of its module, and the number of the expert."""

    name: str
    precision: LinearPrecision
    run: Nvfp4Run

    def product(self, x: Tensor, weight_NK: Tensor) -> Tensor:
        """x W^T in this layer's precision, [..., K] -> [..., N], in the dtype of x."""
        function = Nvfp4Product if self.precision == "nvfp4" else Mxfp8Product
        out: Tensor = function.apply(x, weight_NK, self)
        return out


# ---- roundings: fp32 matrices whose last dimension is summed over, padded with zeros to whole blocks


def round_vectors(x_MK: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """NVFP4 with a scale for 16 values of a row, [M, K rounded up to 16]; stochastic with a generator."""
    return nvfp4.fake_nvfp4(_padded(x_MK.float(), nvfp4.BLOCK), generator=generator)


def round_squares(weight_NK: Tensor) -> Tensor:
    """NVFP4 with a scale for 16x16 values, [N, K], both rounded up to 16."""
    padded_NK = _padded(_padded(weight_NK.float(), nvfp4.BLOCK).T, nvfp4.BLOCK).T
    global_scale = nvfp4.global_scale_of(padded_NK.abs().amax())
    squares = padded_NK.abs().unflatten(1, (-1, nvfp4.BLOCK)).unflatten(0, (-1, nvfp4.BLOCK))
    scales = nvfp4.scales_of_amax(squares.amax((1, 3)), global_scale)
    rows = scales.repeat_interleave(nvfp4.BLOCK, 0)
    return nvfp4.fake_nvfp4(padded_NK, global_scale=global_scale, scales=rows)


def round_mxfp8(x_MK: Tensor) -> Tensor:
    """MXFP8 with a scale for 32 values of a row, [M, K rounded up to 32]."""
    return mx.fake_mxfp8(_padded(x_MK.float(), mx.BLOCK))


def rotate(x_MT: Tensor) -> Tensor:
    """Each 16 values of a row times `HADAMARD`, [M, T rounded up to 16]."""
    groups = _padded(x_MT.float(), len(SIGNS)).unflatten(-1, (-1, len(SIGNS)))
    return fp32_product(groups, HADAMARD.to(x_MT.device)).flatten(-2)


def _padded(x_MK: Tensor, multiple: int) -> Tensor:
    return F.pad(x_MK, (0, -x_MK.shape[-1] % multiple))


# ---- products


class Nvfp4Product(torch.autograd.Function):
    """y = x W^T with the three products of the module's docstring: [..., K] and [N, K] -> [..., N], in the dtype of x.

    The product of two E2M1 values is exact; value x scale is rounded to fp32 before it, by 2^-24 at most.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.layer = layer
        y_TN = fp32_product(round_vectors(x.reshape(-1, x.shape[-1])), round_squares(weight_NK).T)[:, : len(weight_NK)]
        return y_TN.reshape(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_NK = ctx.saved_tensors
        run, name, device = ctx.layer.run, ctx.layer.name, x.device
        dy_TN, x_TK = grads[0].reshape(-1, len(weight_NK)), x.reshape(-1, x.shape[-1])
        dx = dw_NK = None
        if ctx.needs_input_grad[0]:
            dy_rounded_TN = round_vectors(dy_TN, run.generator(name, "dx", device))
            dx_TK = fp32_product(dy_rounded_TN, round_squares(weight_NK))[:, : x.shape[-1]]
            dx = dx_TK.reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dy_NT, x_KT = dy_TN.T, x_TK.T
            if not run.disable_rht:
                dy_NT, x_KT = rotate(dy_NT), rotate(x_KT)
            dy_rounded_NT = round_vectors(dy_NT, run.generator(name, "dw", device))
            dw_NK = fp32_product(dy_rounded_NT, round_vectors(x_KT).T).to(weight_NK.dtype)
        return dx, dw_NK, None


class Mxfp8Product(torch.autograd.Function):
    """The same with MXFP8 in the place of NVFP4, as Transformer Engine's MXFP8 recipe has it: W is rounded twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        y_TN = fp32_product(round_mxfp8(x.reshape(-1, x.shape[-1])), round_mxfp8(weight_NK).T)
        return y_TN.reshape(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_NK = ctx.saved_tensors
        dy_TN, x_TK = grads[0].reshape(-1, len(weight_NK)), x.reshape(-1, x.shape[-1])
        dx = dw_NK = None
        if ctx.needs_input_grad[0]:
            dx = fp32_product(round_mxfp8(dy_TN), round_mxfp8(weight_NK.T).T).reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw_NK = fp32_product(round_mxfp8(dy_TN.T), round_mxfp8(x_TK.T).T).to(weight_NK.dtype)
        return dx, dw_NK, None


# ---- layers: low precision wherever bf16 mixed precision is on (`torch.autocast`), and fp32 elsewhere, as in `fp8.py`


class LowPrecisionLinear(Linear):
    """`Linear` whose products are those of a `Layer`. The input is rounded to bf16 first, and the output is bf16."""

    def __init__(self, in_features: int, out_features: int, layer: Layer) -> None:
        super().__init__(in_features, out_features)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(x)
        return self.layer.product(x.to(torch.get_autocast_dtype(device)), self.weight)


class LowPrecisionExperts(Experts):
    """`Experts` of which each has products of its own, with a scale for its matrix and one for the rows that it gets.

    The gradient is autograd's: beside the roundings, many small slices take no time.
    """

    def __init__(self, config: NemotronHConfig, layer: Layer) -> None:
        super().__init__(config)
        self.layers = {
            matrix: [
                Layer(f"{layer.name}.{expert}.{matrix}", layer.precision, layer.run)
                for expert in range(config.n_routed_experts)
            ]
            for matrix in ("up_proj", "down_proj")
        }

    def forward(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        device = x_TD.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(x_TD, weights_TK, chosen_TK)
        dtype = torch.get_autocast_dtype(device)
        rows = dispatch(chosen_TK, len(self.up_proj))
        # The gradient of `embedding` adds up a token's choices in fp32.
        x_SD = F.embedding(rows.token_S, at_least_fp32(x_TD)).to(dtype)
        up, down, out = self.up_proj.unbind(), self.down_proj.unbind(), []
        counts = [each.stop - each.start for _, each in rows.slices]
        for (expert, _), x_RD in zip(rows.slices, x_SD.split(counts), strict=True):
            hidden_RF = squared_relu(self.layers["up_proj"][expert].product(x_RD, up[expert]))
            out.append(self.layers["down_proj"][expert].product(hidden_RF, down[expert]))
        return weighted_sum(torch.cat(out), rows.slot_TK, weights_TK)


def train_in_nvfp4(
    model: NemotronH,
    run: Nvfp4Run,
    recipe: QuantRecipe | None = None,
    num_layers_at_start_in_bf16: int | None = None,
    num_layers_at_end_in_bf16: int | None = None,
) -> dict[str, LinearPrecision]:
    """Replace what `recipe` does not leave in bf16, in place, in all blocks but the first and last few.

    Embedding, output head, router and multi-token prediction stay as they are, and so do parameters and their names:
    optimiser and checkpoints do not see the difference. Call it before the model is sharded.

    Args:
        run: what the layers will share.
        recipe: None: that of Nemotron 3 Super.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: None: as in `nvfp4_layers`.

    Returns:
        The precision of each replaced module, by its name.

    Raises:
        ValueError: no block is left between the first and the last ones.
    """
    recipe, replaced = recipe or QuantRecipe(), dict[str, LinearPrecision]()
    pattern = model.config.hybrid_override_pattern
    for index in nvfp4_layers(pattern, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16):
        mixer = model.blocks()[index].mixer
        for part, module in list(mixer.named_modules()):
            precision: LinearPrecision = getattr(recipe, KINDS[part]) if part in KINDS else "bf16"
            if precision == "bf16":
                continue
            layer = Layer(f"backbone.layers.{index}.mixer.{part}", precision, run)
            replacement: Linear | Experts
            with torch.device("meta"):  # no memory, and no random numbers drawn: it gets the weights that are there
                if isinstance(module, Experts):
                    replacement = LowPrecisionExperts(model.config, layer)
                else:
                    assert isinstance(module, Linear)
                    replacement = LowPrecisionLinear(module.in_features, module.out_features, layer)
            for name, parameter in module.named_parameters():
                setattr(replacement, name, parameter)
            mixer.set_submodule(part, replacement.train(module.training))
            replaced[layer.name] = precision
    return replaced
