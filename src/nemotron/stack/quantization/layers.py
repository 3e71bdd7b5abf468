"""A quantised model, emulated: which matrix is in which format, its codes and scales, and what activations become.

    plan = plan_layers(model.config, precision)                    # backbone.layers.1.mixer.experts.up_proj -> NVFP4
    amax = calibrate(model, batches, kv_cache=True)                # calibration.py
    quantization = quantize(model, plan, amax, "mse", ssm_state="FP32")
    with quantized_weights(model, quantization): ...               # weights as their codes have them
    round_activations(model, quantization)                         # from here on, in training and in decoding alike

Products are fp32 products of rounded values: what a GPU sums up in fp32 is summed up in fp32. (Under autocast to bf16,
as QAD may train, the products of codes and scales are rounded once more, by up to 0.4 %.) A layer's matrix has the
name of its module; all routed experts of a block are one stack, with a scale each: `….experts.up_proj`.

Shapes: [N, K] a weight, [E, N, K] a stack of experts, [..., K] an operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemotron.kit.schemas.quantization import PrecisionConfig, QuantAlgo, WeightScales
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.linear import Linear, Rounding
from nemotron.stack.models.mamba2 import Mamba2
from nemotron.stack.models.moe import Experts
from nemotron.stack.models.nemotron_h import NemotronH
from nemotron.stack.quantization.fp8_ptq import FP8, fake_fp8, quantize_fp8, scale_of
from nemotron.stack.quantization.nvfp4 import NVFP4, choose_scales, fake_nvfp4, global_scale_of, quantize_with_scales
from nemotron.stack.quantization.ssm_state import fp16_state

Packed = FP8 | NVFP4
SsmState = Literal["FP32", "FP16", "FP16_stochastic"]


@dataclass(frozen=True)
class Amax:
    """Largest |x| over the calibration samples. inputs: by the matrix that x is multiplied with. kv: of the output of
    k_proj and v_proj, by their names; empty where the cache is not quantised."""

    inputs: dict[str, float]
    kv: dict[str, float]


@dataclass(frozen=True)
class Quantization:
    """What a quantised model has beside its parameters.

    plan: the format of every matrix that has one. packed: its codes and scales, a scale an expert for a stack of them.
    input_scales: static scale of the operand of every matrix whose format has one: amax / 448, or amax / (6 * 448).
    kv_scales: amax / 448 of what k_proj and v_proj give, by their names; empty where the cache is not quantised.
    """

    plan: dict[str, QuantAlgo]
    packed: dict[str, Packed]
    input_scales: dict[str, Tensor]
    kv_scales: dict[str, Tensor]
    ssm_state: SsmState

    def to(self, device: torch.device) -> Quantization:
        """The same with codes and scales of weights on `device`."""
        packed: dict[str, Packed] = {}
        for name, each in self.packed.items():
            if isinstance(each, FP8):
                packed[name] = FP8(each.codes.to(device), each.scale.to(device))
            else:
                packed[name] = NVFP4(each.codes.to(device), each.scales.to(device), each.global_scale.to(device))
        return replace(self, packed=packed)


# ---- which layers


def layer_kinds(config: NemotronHConfig) -> dict[str, str]:
    """Every matrix that may be quantised -> its row of `PrecisionConfig`; the multi-token prediction has none."""
    kinds: dict[str, str] = {}
    for index, symbol in enumerate(config.hybrid_override_pattern):
        mixer = f"backbone.layers.{index}.mixer"
        if symbol == "M":
            kinds |= {f"{mixer}.in_proj": "mamba_in_proj", f"{mixer}.out_proj": "mamba_out_proj"}
        elif symbol == "*":
            kinds |= {f"{mixer}.{name}_proj": "attention_qkv" for name in "qkv"}
            kinds[f"{mixer}.o_proj"] = "attention_out"
        elif symbol == "E":
            if config.moe_latent_size is not None:
                kinds |= {f"{mixer}.{name}_latent_proj": "latent_proj" for name in ("fc1", "fc2")}
            kinds |= {f"{mixer}.experts.{name}_proj": "routed_experts" for name in ("up", "down")}
            kinds |= {f"{mixer}.shared_experts.{name}_proj": "shared_experts" for name in ("up", "down")}
        else:
            kinds |= {f"{mixer}.{name}_proj": "mlp" for name in ("up", "down")}
    return kinds | {"lm_head": "lm_head"}


def plan_layers(config: NemotronHConfig, precision: PrecisionConfig) -> dict[str, QuantAlgo]:
    """The format of every matrix that a table quantises, in the order of the model."""
    pattern, rows = config.hybrid_override_pattern, precision.model_dump()
    plan: dict[str, QuantAlgo] = {}
    for name, kind in layer_kinds(config).items():
        algorithm = rows[kind]
        if kind.startswith("mamba") and precision.mamba_before_attention is not None:
            index = int(name.split(".")[2])
            if pattern[index + 1 : index + 2] == "*":
                algorithm = precision.mamba_before_attention
        if algorithm != "BF16":
            plan[name] = algorithm
    return plan


def matrix(model: NemotronH, name: str) -> nn.Parameter:
    """The weight [N, K] or the stack [E, N, K] of a name of the plan."""
    found = model.get_submodule(name).weight if ".experts." not in name else model.get_parameter(name)
    assert isinstance(found, nn.Parameter)
    return found


# ---- weights


def quantize(
    model: NemotronH, plan: dict[str, QuantAlgo], amax: Amax, scales: WeightScales, ssm_state: SsmState
) -> Quantization:
    """Codes and scales of the plan's matrices, and static scales of activations from their largest values."""
    input_scales = {
        name: (scale_of if algorithm == "FP8" else global_scale_of)(torch.tensor(amax.inputs[name]))
        for name, algorithm in plan.items()
        if algorithm != "W4A16_NVFP4"
    }
    kv_scales = {name: scale_of(torch.tensor(largest)) for name, largest in amax.kv.items()}
    return Quantization(plan, quantize_weights(model, plan, scales), input_scales, kv_scales, ssm_state)


def fused_with(name: str) -> list[str]:
    """The matrices that engines store and multiply as one with this, which is among them: q, k and v of a block."""
    block = re.fullmatch(r"(.*)\.[qkv]_proj", name)
    return [f"{block[1]}.{each}_proj" for each in "qkv"] if block else [name]


@torch.no_grad()
def quantize_weights(model: NemotronH, plan: Mapping[str, QuantAlgo], scales: WeightScales) -> dict[str, Packed]:
    """Codes and scales of every matrix of the plan; `scales`: how NVFP4's are chosen (FP8's are max |w| / 448).

    q, k and v of a block have one global scale in NVFP4, and one scale in FP8, that of the largest value of the three.
    Engines fuse them and go by the largest of their scales: of NVFP4 they would read the codes of the others with it.
    (ModelOpt does the same in NVFP4, `preprocess_linear_fusion`; in FP8 it leaves it to the engine to round again.)

    Raises:
        ValueError: the inner dimension of a matrix is no multiple of 16, the block of NVFP4.
    """
    packed: dict[str, Packed] = {}
    for name, algorithm in plan.items():
        weight = matrix(model, name).float()
        fused = [matrix(model, each) for each in fused_with(name) if plan.get(each) == algorithm]
        amax = torch.stack([each.abs().amax((-2, -1), keepdim=each.dim() == 3) for each in fused]).amax(0).float()
        if algorithm == "FP8":
            packed[name] = quantize_fp8(weight, scale=scale_of(amax))
            continue
        try:
            global_scale = global_scale_of(amax, scales)
            packed[name] = quantize_with_scales(weight, choose_scales(weight, global_scale, scales), global_scale)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return packed


def requantized(weight: Tensor, packed: Packed) -> Tensor:
    """What is left of a weight in the format and with the scales of `packed`, which stay: [..., N, K] in its dtype."""
    if isinstance(packed, FP8):
        return fake_fp8(weight, scale=packed.scale)
    return fake_nvfp4(weight, global_scale=packed.global_scale, scales=packed.scales)


def repacked(weight: Tensor, packed: Packed) -> Packed:
    """The codes of a weight for the scales of `packed`."""
    if isinstance(packed, FP8):
        return quantize_fp8(weight, scale=packed.scale)
    return quantize_with_scales(weight, packed.scales, packed.global_scale)


@contextmanager
def quantized_weights(model: NemotronH, quantization: Quantization) -> Iterator[None]:
    """In the block the matrices of the plan have their quantised values, with frozen scales; behind it their own again.

    A gradient computed in it is that of the quantised values, and is left to the full ones (straight through).
    """
    full = {name: matrix(model, name).data for name in quantization.plan}
    try:
        for name, weight in full.items():
            matrix(model, name).data = requantized(weight, quantization.packed[name])
        yield
    finally:
        for name, weight in full.items():
            matrix(model, name).data = weight


# ---- activations


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        return rounding(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(rounding: Rounding) -> Rounding:
    """The same rounding with the gradient of the identity."""

    def apply(x: Tensor) -> Tensor:
        out: Tensor = StraightThrough.apply(x, rounding)
        return out

    return apply


def fp8_rounding(scale: Tensor) -> Rounding:
    """E4M3 with a static scale; values beyond 448 times it saturate."""
    return straight_through(lambda x: fake_fp8(x, scale=scale))


def nvfp4_rounding(global_scale: Tensor) -> Rounding:
    """E2M1 with a static global scale and, for each block of 16, the scale of its largest value."""
    return straight_through(lambda x: fake_nvfp4(x, global_scale=global_scale))


def operands(model: NemotronH) -> Iterator[tuple[str, nn.Module, str]]:
    """Where activations enter a product: name of the matrix, module, and the attribute that rounds them."""
    for name, module in model.named_modules():
        if name.startswith("mtp."):
            continue
        if isinstance(module, Linear):
            yield name, module, "round_input"
        elif isinstance(module, Experts):
            yield f"{name}.up_proj", module, "round_input"
            yield f"{name}.down_proj", module, "round_active"


def round_activations(model: NemotronH, quantization: Quantization) -> None:
    """Let the model round what it multiplies, keeps as keys and values, and keeps as state, as the plan says.

    The model stays on the device where it is.
    """
    device = model.lm_head.weight.device
    for name, module, attribute in operands(model):
        if (scale := quantization.input_scales.get(name)) is not None:
            rounding = fp8_rounding if quantization.plan[name] == "FP8" else nvfp4_rounding
            setattr(module, attribute, rounding(scale.to(device)))
    for name, scale in quantization.kv_scales.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear)
        linear.round_output = fp8_rounding(scale.to(device))
    for block in model.blocks():
        if isinstance(block.mixer, Mamba2) and quantization.ssm_state != "FP32":
            block.mixer.round_state = state_rounding(quantization.ssm_state, block.mixer.A_log.device)


def state_rounding(state: SsmState, device: torch.device) -> Rounding:
    """What is stored of an SSM state in FP16: nearest values, or at random with a generator of its own."""
    if state == "FP16":
        return lambda x: x.to(torch.float16).to(x.dtype)
    return fp16_state(torch.Generator(device=device).manual_seed(0))
