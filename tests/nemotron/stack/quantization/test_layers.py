"""Tables as plans, calibration, rounding in training and in decoding, and the straight-through gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_runspec.errors import RunFailed
from nemotron.kit.schemas.quantization import PrecisionConfig, QuantAlgo
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.models.moe import Experts
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.quantization.calibration import calibrate
from nemotron.stack.quantization.fp8_ptq import FP8, fake_fp8
from nemotron.stack.quantization.layers import (
    Quantization,
    matrix,
    plan_layers,
    quantize,
    quantize_weights,
    quantized_weights,
    repacked,
    round_activations,
)
from nemotron.stack.quantization.nvfp4 import NVFP4, fake_nvfp4
from nemotron.stack.training.loaders import Batch

from .quantized_models import RELEASED, TINY, UNQUANTIZED, bf16_model

AGGRESSIVE = UNQUANTIZED | dict.fromkeys(
    ("attention_qkv", "attention_out", "latent_proj", "routed_experts", "shared_experts", "mamba_in_proj",
     "mamba_out_proj", "lm_head"), "NVFP4",
) | {"kv_cache": "FP8"}  # fmt: skip


def ids(rows: int = 2, length: int = 32) -> Tensor:
    return torch.randint(TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def quantized(model: NemotronH, table: dict[str, Any]) -> Quantization:
    precision = PrecisionConfig(**table)
    batch = Batch(ids(), ids(), torch.ones_like(ids()))
    amax = calibrate(model, [batch], precision.kv_cache == "FP8")
    return quantize(model, plan_layers(model.config, precision), amax, "max", precision.ssm_state)


# ---- tables


def test_nano_3_in_fp8_leaves_attention_and_the_mamba_blocks_before_it() -> None:
    config = PRESETS["nano3-30b"]
    table = UNQUANTIZED | dict.fromkeys(("routed_experts", "shared_experts", "mamba_in_proj", "mamba_out_proj"), "FP8")
    plan = plan_layers(config, PrecisionConfig(**table, mamba_before_attention="BF16"))
    pattern = config.hybrid_override_pattern
    before = [i - 1 for i, symbol in enumerate(pattern) if symbol == "*"]
    assert len(before) == 6 and {pattern[i] for i in before} == {"M"}  # arXiv 2512.20848, section 4
    layers = {int(name.split(".")[2]) for name in plan}
    assert layers == {i for i, symbol in enumerate(pattern) if symbol in "ME"} - {*before}
    assert len(plan) == 17 * 2 + 23 * 4 and set(plan.values()) == {"FP8"}


def test_the_released_table_of_super_3() -> None:
    plan = plan_layers(PRESETS["super3-120b"], PrecisionConfig(**RELEASED))
    by_format: dict[str, set[str]] = {}
    for name, algorithm in plan.items():
        by_format.setdefault(algorithm, set()).add(name.partition("mixer.")[2])
    assert by_format == {
        "NVFP4": {"experts.up_proj", "experts.down_proj"},
        "FP8": {"in_proj", "out_proj", "shared_experts.up_proj", "shared_experts.down_proj"},
    }
    assert len(plan) == 40 * 2 + 40 * 4  # of 40 M and 40 E blocks


# ---- calibration


def test_calibration_sees_what_is_multiplied() -> None:
    model = bf16_model()
    seen: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            handles.append(module.register_forward_hook(
                lambda _, args, out, name=name: seen.update({name: args[0].abs().max(), f"{name} out": out.abs().max()})
            ))  # fmt: skip
        elif isinstance(module, Experts):

            def watch(experts: Experts, args: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
                x_TD, _, chosen_TK = args
                seen[f"{name}.up_proj"] = x_TD.abs().max()
                active = [
                    torch.relu(x_TD[t] @ experts.up_proj[e].T) ** 2
                    for t, e in zip(
                        torch.arange(len(x_TD)).repeat_interleave(chosen_TK.shape[1]), chosen_TK.flatten(), strict=True
                    )
                ]
                seen[f"{name}.down_proj"] = torch.stack(active).max()

            handles.append(module.register_forward_hook(watch))  # fmt: skip
    with torch.no_grad():
        model(ids(), mtp_depths=0)
    for handle in handles:
        handle.remove()
    amax = calibrate(model, [Batch(ids()[:1], ids()[:1], ids()[:1]), Batch(ids()[1:], ids()[1:], ids()[1:])], True)
    assert not any(name.startswith("mtp.") for name in amax.inputs)
    for name, value in amax.inputs.items():
        assert value == pytest.approx(seen[name].item(), rel=1e-5), name
    kv = ("backbone.layers.3.mixer.k_proj", "backbone.layers.3.mixer.v_proj")
    assert amax.kv == {name: pytest.approx(seen[f"{name} out"].item(), rel=1e-5) for name in kv}
    assert all(module.round_input is None for module in model.modules() if isinstance(module, Linear | Experts))


# ---- weights


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "FP8"])
def test_an_engine_that_fuses_q_k_and_v_reads_what_we_do(algorithm: QuantAlgo) -> None:
    model = bf16_model()
    names = [f"backbone.layers.3.mixer.{each}_proj" for each in "qkv"]
    for factor, name in enumerate(names, start=1):
        matrix(model, name).data *= factor
    packed = quantize_weights(model, dict.fromkeys(names, algorithm), "four_over_six")
    stored = [each.scale if isinstance(each, FP8) else each.global_scale for each in packed.values()]
    for name, each in packed.items():  # codes and block scales as stored, the largest of the three scales
        fused = replace(each, **{"scale" if isinstance(each, FP8) else "global_scale": max(stored)})
        assert torch.equal(fused.dequantize(), each.dequantize()), name
        weight = matrix(model, name).detach()
        assert (each.dequantize() - weight).norm() < 0.15 * weight.norm(), name
    assert len({float(each) for each in stored}) == 1


def test_matrices_in_different_formats_share_no_scale() -> None:
    model = bf16_model()
    q, k, o = (f"backbone.layers.3.mixer.{each}_proj" for each in "qko")
    matrix(model, k).data *= 4
    matrix(model, o).data *= 8
    packed = quantize_weights(model, {q: "NVFP4", k: "FP8", o: "NVFP4"}, "max")
    alone = quantize_weights(model, {q: "NVFP4"}, "max")
    assert isinstance(mine := packed[q], NVFP4) and isinstance(other := alone[q], NVFP4)
    assert torch.equal(mine.global_scale, other.global_scale)


# ---- the forward pass


def test_experts_multiply_rounded_operands() -> None:
    model = bf16_model()
    experts = model.moe_blocks()[0].experts
    experts.round_input, experts.round_active = (lambda x: fake_nvfp4(x), lambda a: fake_fp8(a))
    x_TD = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    chosen_TK, weights_TK = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 1], [1, 2]]), torch.full((6, 2), 0.5)
    experts.round_active = lambda a: (a * 8).round() / 8  # each value by itself, whatever rows are rounded together
    out_TD = experts(x_TD, weights_TK, chosen_TK)
    x_TD = fake_nvfp4(x_TD)
    for token in range(6):
        expected = torch.zeros(32)
        for weight, expert in zip(weights_TK[token], chosen_TK[token], strict=True):
            active = (torch.relu(x_TD[token] @ experts.up_proj[expert].T) ** 2 * 8).round() / 8
            expected += weight * (active @ experts.down_proj[expert].T)
        torch.testing.assert_close(out_TD[token], expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_experts_pass_the_rounding() -> None:
    model = bf16_model()
    experts = model.moe_blocks()[0].experts
    experts.round_active = lambda a: (a * 8).round() / 8
    x_TD = torch.randn(6, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    chosen_TK, weights_TK = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 1], [1, 2]]), torch.full((6, 2), 0.5)
    ours = torch.autograd.grad(
        experts(x_TD, weights_TK, chosen_TK).square().sum(), [x_TD, experts.up_proj, experts.down_proj]
    )
    out = []
    for token in range(6):
        parts = []
        for expert in chosen_TK[token]:
            active = torch.relu(x_TD[token] @ experts.up_proj[expert].T) ** 2
            active = active + ((active * 8).round() / 8 - active).detach()
            parts.append(0.5 * (active @ experts.down_proj[expert].T))
        out.append(torch.stack(parts).sum(0))
    theirs = torch.autograd.grad(torch.stack(out).square().sum(), [x_TD, experts.up_proj, experts.down_proj])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_decoding_rounds_as_a_forward_pass_does() -> None:
    """A sum in another order may tip a value over to the next code, so that the two differ by far less than what
    rounding does, and by more than fp32 would."""
    model = bf16_model()
    quantization = quantized(model, AGGRESSIVE)
    tokens_BL = ids(3, 24)
    with torch.no_grad():
        full = model(tokens_BL, mtp_depths=0).logits
        with quantized_weights(model, quantization):
            round_activations(model, quantization)
            whole = model(tokens_BL, mtp_depths=0).logits
            logits, cache = prefill(model, tokens_BL[:, :16], torch.ones(3, 16, dtype=torch.bool), 24)
            decoded = [logits, *(step(model, tokens_BL[:, i], cache) for i in range(16, 24))]
    decoded_BLV = torch.stack(decoded, 1)
    lost = (whole - full)[:, 15:].abs().mean()
    assert lost > 0.05 * full.abs().mean()
    assert (decoded_BLV - whole[:, 15:]).abs().mean() < 0.1 * lost


def test_the_cache_holds_values_of_fp8() -> None:
    model = bf16_model()
    quantization = quantized(model, RELEASED)
    round_activations(model, quantization)
    with torch.no_grad():
        _, cache = prefill(model, ids(2, 16), torch.ones(2, 16, dtype=torch.bool), 20)
        step(model, ids(2, 1)[:, 0], cache)
    attention = cache.layers[3]
    for name, kept in (("k", attention.k), ("v", attention.v)):
        scale = quantization.kv_scales[f"backbone.layers.3.mixer.{name}_proj"]
        values = kept[:, :, :17] / scale
        torch.testing.assert_close(values.to(torch.float8_e4m3fn).float(), values, rtol=1e-6, atol=0)
        assert len(values.unique()) > 50


@pytest.mark.parametrize("state", ["FP16", "FP16_stochastic"])
def test_the_state_holds_values_of_fp16(state: str) -> None:
    model = bf16_model()
    round_activations(model, quantized(model, UNQUANTIZED | {"ssm_state": state}))
    with torch.no_grad():
        _, cache = prefill(model, ids(2, 16), torch.ones(2, 16, dtype=torch.bool), 20)
        for token in range(3):
            step(model, ids(2, 3)[:, token], cache)
    kept = cache.layers[0].ssm
    assert torch.equal(kept.half().float(), kept)
    nearest = bf16_model()
    round_activations(nearest, quantized(nearest, UNQUANTIZED | {"ssm_state": "FP16"}))
    with torch.no_grad():
        _, other = prefill(nearest, ids(2, 16), torch.ones(2, 16, dtype=torch.bool), 20)
    assert torch.equal(other.layers[0].ssm.half().float(), other.layers[0].ssm)


# ---- distillation through the rounding


def test_gradients_are_those_of_the_rounded_weights_and_the_weights_stay() -> None:
    model, other = bf16_model(), bf16_model()
    table = AGGRESSIVE | {"kv_cache": "BF16"}
    quantization = quantized(model, dict.fromkeys(table, "W4A16_NVFP4") | {
        name: value for name, value in table.items() if value != "NVFP4"})  # fmt: skip
    assert quantization.input_scales == {}  # weights alone
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with quantized_weights(model, quantization):
        model(ids(), mtp_depths=0).logits.square().sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for name, packed in quantization.packed.items():
            matrix(other, name).copy_(packed.dequantize())
    other(ids(), mtp_depths=0).logits.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if not name.startswith("mtp."):
            assert mine.grad is not None and theirs.grad is not None
            assert torch.equal(mine.grad, theirs.grad), name


def test_codes_of_unchanged_weights_under_frozen_scales_are_the_same() -> None:
    model = bf16_model()
    quantization = quantized(model, RELEASED | {"lm_head": "W4A16_NVFP4"})
    assert len(quantization.packed) > 1
    for name, packed in quantization.packed.items():
        again = repacked(matrix(model, name).detach(), packed)
        assert torch.equal(again.dequantize(), packed.dequantize()), name


def test_models_without_quantisation_are_what_they_were() -> None:
    model = bf16_model()
    before = model(ids(), mtp_depths=0).logits
    other = bf16_model()
    round_activations(other, quantized(other, RELEASED))
    assert not torch.equal(other(ids(), mtp_depths=0).logits, before)
    assert torch.equal(model(ids(), mtp_depths=0).logits, before)


def test_an_activation_that_is_no_number_stops_the_calibration() -> None:
    model = bf16_model()
    model.backbone.embeddings.weight.data[3] = torch.nan
    with pytest.raises(RunFailed, match="an activation of the model is nan"):
        calibrate(model, [Batch(ids(), ids(), torch.ones_like(ids()))], False)
