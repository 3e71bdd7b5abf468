"""Quantised directories: ModelOpt's export of the same model bit for bit, round trips, sizes, what is refused."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.quantization import PrecisionConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.attention import Attention
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.models.published.hub import hub_layout
from nemotron.stack.quantization.calibration import calibrate
from nemotron.stack.quantization.export import (
    load_model,
    quant_config,
    quantization_config,
    read_quantization,
    save_quantized,
    stored_bytes,
)
from nemotron.stack.quantization.layers import Quantization, plan_layers, quantize
from nemotron.stack.training.loaders import Batch

from .quantized_models import RELEASED, TINY, UNQUANTIZED, bf16_model

RECORDED = json.loads(lzma.decompress((Path(__file__).parent / "recorded/modelopt_export.json.xz").read_bytes()))


def filled(name: str, shape: torch.Size) -> Tensor:
    """What the recording filled a tensor with: multiples of 1/128, from the digest of its name."""
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    x = ((torch.arange(shape.numel()) + 1) * 1103515245 + seed * 12345) % 2**31
    x = (x ^ (x >> 13)) % 251 - 125
    scale = 0.25 if name.endswith("weight") and "norm" not in name else 1.0
    return (x.double() / 128 * scale).float().view(shape)


def batch_of(ids_BL: Tensor) -> Batch:
    return Batch(ids_BL, ids_BL, torch.ones_like(ids_BL))


def quantized(model: NemotronH, table: dict[str, Any], scales: str = "max") -> Quantization:
    precision = PrecisionConfig(**table)
    ids_BL = torch.arange(4 * 32).view(4, 32) * 7 % model.config.vocab_size
    amax = calibrate(model, [batch_of(ids_BL)], precision.kv_cache == "FP8")
    return quantize(model, plan_layers(model.config, precision), amax, scales, precision.ssm_state)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["nvfp4", "fp8"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Our export of the recorded model, and the record."""
    case = RECORDED["cases"][request.param]
    model = NemotronH(config_from_dict(RECORDED["dims"])).eval()
    with torch.no_grad():
        for name, tensor in hub_layout(model.state_dict()).items():
            tensor.copy_(filled(name, tensor.shape))
    precision = PrecisionConfig(**RELEASED | {"routed_experts": request.param.upper()})
    amax = calibrate(model, [batch_of((torch.arange(128) * 37 % 64).view(2, 64))], kv_cache=True)
    quantization = quantize(model, plan_layers(model.config, precision), amax, "max", "FP32")
    folder = tmp_path_factory.mktemp(request.param)
    save_quantized(folder, model, quantization)
    return folder, case


def test_tensors_are_modelopts(both: tuple[Path, dict[str, Any]]) -> None:
    folder, case = both
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == case["tensors"].keys()
    packed = {name.removesuffix("_scale") for name in ours if name.endswith(".weight_scale")}
    for name, (dtype, shape, value) in case["tensors"].items():
        tensor, leaf = ours[name], name.rpartition(".")[2]
        assert list(tensor.shape) == shape, name
        if leaf in ("input_scale", "k_scale", "v_scale"):
            if ".experts." in name:  # theirs is of the tokens of one expert, ours of all
                layer = name.partition(".experts.")[0]
                of_all = [v[2] for n, v in case["tensors"].items() if n.startswith(f"{layer}.experts.") and n.endswith(
                    f"{name.rpartition('.experts.')[2].partition('.')[2]}")]  # fmt: skip
                value = max(of_all)
            assert tensor.item() == pytest.approx(value, rel=1e-5), name
        elif name in packed or leaf in ("weight_scale", "weight_scale_2"):
            assert str(tensor.dtype) == f"torch.{dtype}", name
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(data).hexdigest()[:16] == value, name
        else:
            assert tensor.dtype == (torch.float32 if ".gate." in name else torch.bfloat16), name


def test_configs_are_modelopts(both: tuple[Path, dict[str, Any]]) -> None:
    folder, case = both
    ours, theirs = json.loads((folder / "hf_quant_config.json").read_text()), case["hf_quant_config"]
    assert ours["producer"] == theirs["producer"]
    mine, recorded = ours["quantization"], theirs["quantization"]
    for key in ("quant_algo", "kv_cache_quant_algo"):
        assert mine[key] == recorded[key]
    if "quantized_layers" in recorded:  # there the experts of a block are one entry, here one each
        by_block = {name.partition(".experts.")[0] + ".experts" if ".experts." in name else name: value
                    for name, value in mine["quantized_layers"].items()}  # fmt: skip
        assert by_block == recorded["quantized_layers"]
    else:
        attention = {f"backbone.layers.2.mixer.{name}_proj" for name in "qkvo"}  # there a wildcard
        assert {*mine["exclude_modules"]} - attention == {*recorded["exclude_modules"]} - {"backbone.layers.2*"}
    in_config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for key in ("quant_algo", "kv_cache_scheme", "quant_method", "producer"):
        assert in_config[key] == case["quantization_config"][key]
    groups = [
        sorted(
            json.dumps({k: v for k, v in group.items() if k != "targets"}, sort_keys=True) for group in each.values()
        )
        for each in (in_config["config_groups"], case["quantization_config"]["config_groups"])
    ]
    assert groups[0] == groups[1]


def test_modelopt_reads_the_codes(both: tuple[Path, dict[str, Any]]) -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    folder, _ = both
    ours = load_file(folder / "model.safetensors")
    read = load_model(folder)
    weights = hub_layout(read.state_dict())
    names = [each.removesuffix("_scale") for each in ours if each.endswith(".weight_scale")]
    assert len(names) > 1
    for name in names:
        codes, scale, shape = ours[name], ours[f"{name}_scale"], weights[name].shape
        if codes.dtype == torch.uint8:
            theirs = qtensor.NVFP4QTensor(shape, torch.float32, codes).dequantize(
                scale=scale, double_scale=ours[f"{name}_scale_2"], block_sizes={-1: 16}, fast=False
            )
        else:
            theirs = qtensor.FP8QTensor(shape, torch.float32, codes).dequantize(scale=scale)
        assert torch.equal(weights[name], theirs), name


@pytest.mark.parametrize("state", ["FP32", "FP16", "FP16_stochastic"])
@pytest.mark.parametrize("experts", ["NVFP4", "W4A16_NVFP4", "FP8", "BF16"])
def test_what_was_written_is_read(tmp_path: Path, experts: str, state: str) -> None:
    model = bf16_model()
    table = RELEASED | {"routed_experts": experts, "ssm_state": state, "lm_head": "W4A16_NVFP4"}
    before = quantized(model, table, "mse")
    save_quantized(tmp_path, model, before)
    after = read_quantization(tmp_path, model)
    assert (after.plan, after.ssm_state) == (before.plan, state)
    assert after.input_scales == before.input_scales and after.kv_scales == before.kv_scales
    for name, packed in before.packed.items():
        for field, value in vars(packed).items():
            assert torch.equal(getattr(after.packed[name], field).float(), value.float()), (name, field)
    loaded, own = hub_layout(load_model(tmp_path).state_dict()), hub_layout(model.state_dict())
    stored = load_file(tmp_path / "model.safetensors")
    for name in own:
        if f"{name}_scale" not in stored:
            assert torch.equal(loaded[name], own[name]), name  # bf16 has these values


def test_the_bytes_are_those_that_shapes_and_formats_say(tmp_path: Path) -> None:
    model = bf16_model()
    quantization = quantized(model, RELEASED)
    save_quantized(tmp_path, model, quantization)
    in_file = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    sizes = stored_bytes(model, quantization.plan)
    assert sizes["quantized"] == in_file - 2 * 4  # k_scale and v_scale
    # By hand: 2 E blocks of 4 experts of up 32x32 and down 32x32 in NVFP4, a shared expert of 64x64 twice in FP8, 2 M
    # blocks of in_proj 64x164 and out_proj 64x64 in FP8.
    nvfp4, fp8 = 2 * 4 * 2, 2 * 2 + 2 * 2
    fp8_values = 2 * 2 * 64 * 64 + 2 * (64 * (64 + 96 + 4) + 64 * 64)
    saved = nvfp4 * (1024 * 2 - 1024 * 9 // 16 - 8) + fp8_values - fp8 * 8
    assert sizes["full"] - sizes["quantized"] == saved


def test_a_table_that_quantises_nothing_is_the_model(tmp_path: Path) -> None:
    model = bf16_model()
    save_quantized(tmp_path, model, quantized(model, UNQUANTIZED))
    ids_BL = torch.arange(32).view(1, 32)
    assert json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] is None
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(ids_BL, mtp_depths=0).logits, model(ids_BL, mtp_depths=0).logits)


def test_keys_and_values_alone_may_be_quantised(tmp_path: Path) -> None:
    model = bf16_model()
    before = quantized(model, UNQUANTIZED | {"kv_cache": "FP8"})
    save_quantized(tmp_path, model, before)
    read = load_model(tmp_path)
    assert read_quantization(tmp_path, model).kv_scales == before.kv_scales
    attention = read.blocks()[3].mixer
    assert isinstance(attention, Attention) and attention.k_proj.round_output and attention.v_proj.round_output


def test_one_format_needs_no_list_of_layers() -> None:
    model = bf16_model()
    plan = plan_layers(TINY, PrecisionConfig(**UNQUANTIZED | {"routed_experts": "NVFP4", "shared_experts": "NVFP4"}))
    config = quant_config(model, plan, fp8_kv_cache=False)
    assert config["quantization"]["quant_algo"] == "NVFP4" and config["quantization"]["group_size"] == 16
    assert "quantized_layers" not in config["quantization"]
    assert quantization_config(config)["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert {"mtp*", "lm_head", "backbone.layers.0.mixer.conv1d", "backbone.layers.1.mixer.gate"} <= {
        *config["quantization"]["exclude_modules"]
    }


def damage(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    save_file({n: t for n, t in (tensors | {name: tensor}).items() if t is not None}, folder / "model.safetensors")


UP = "backbone.layers.1.mixer.experts.0.up_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{UP}.weight_scale_2", None, f"{UP}.weight_scale_2 is missing, and .*NVFP4"),
        (f"{UP}.input_scale", None, f"{UP}.input_scale is missing, and .*NVFP4"),
        (f"{UP}.weight_scale", torch.ones(32, 2), r"weight_scale is F32 \[32, 2\], F8_E4M3 \[32, 2\] expected"),
        (f"{UP}.weight", torch.zeros(32, 8, dtype=torch.uint8), r"weight is U8 \[32, 8\], U8 \[32, 16\] expected"),
        (f"{UP}.weight_scale", None, "weight_scale is missing"),
        ("backbone.norm_f.weight", None, "backbone.norm_f.weight is missing"),
        (
            "backbone.norm_g.weight",
            torch.ones(2),
            "backbone.norm_g.weight is a tensor that this config has no place for",
        ),
    ],
)
def test_a_damaged_directory_is_refused(tmp_path: Path, name: str, tensor: Tensor | None, said: str) -> None:
    model = bf16_model()
    save_quantized(tmp_path, model, quantized(model, RELEASED))
    damage(tmp_path, name, tensor)
    with pytest.raises(UserError, match=said):
        load_model(tmp_path)


def test_a_quantised_model_is_not_trained_further(tmp_path: Path) -> None:
    model = bf16_model()
    save_quantized(tmp_path, model, quantized(model, RELEASED))
    with pytest.raises(UserError, match="its weights are quantised"):
        NemotronH.from_pretrained(tmp_path)


def test_a_format_that_nothing_here_reads_is_refused(tmp_path: Path) -> None:
    model = bf16_model()
    save_quantized(tmp_path, model, quantized(model, RELEASED))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quantized_layers"][UP]["quant_algo"] = "NVFP4_AWQ"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="up_proj is NVFP4_AWQ, which cannot be read"):
        load_model(tmp_path)


def test_experts_with_scales_of_their_own_get_the_largest(tmp_path: Path) -> None:
    model = bf16_model()
    before = quantized(model, RELEASED)
    save_quantized(tmp_path, model, before)
    name = "backbone.layers.1.mixer.experts.up_proj"
    larger = before.input_scales[name] * 2
    damage(tmp_path, f"{UP}.input_scale", larger)
    assert read_quantization(tmp_path, model).input_scales == replace(before).input_scales | {name: larger}
