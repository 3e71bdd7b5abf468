"""Initialisation, size and files of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_runspec.errors import UserError
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.config_json import config_from_dict


def test_initial_weights() -> None:
    torch.manual_seed(0)
    config = NemotronHConfig("MEM*-", mamba_num_heads=64, mamba_head_dim=8, initializer_range=0.03)
    model = NemotronH(config)
    parameters = dict(model.named_parameters())
    for layer in (0, 2):
        mixer = model.blocks()[layer].mixer
        torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 65.0))
        assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
        dt = torch.nn.functional.softplus(mixer.dt_bias.double())
        assert dt.min() >= 0.99e-3 and dt.max() <= 1.01e-1
        # log-uniform on [1e-3, 1e-1]: mean log10 is -2, its standard error over 64 heads 0.577 / 8
        assert abs(dt.log10().mean() + 2) < 3 * 0.577 / 8
        assert abs(dt.log10().std() - 0.577) < 0.2
        # Conv1d's own uniform on +- 1/sqrt(width)
        assert 0.48 < mixer.conv1d.weight.abs().max() <= 0.5 and 0.4 < mixer.conv1d.bias.abs().max() <= 0.5
        assert mixer.conv1d.weight.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.05)
    for name, parameter in parameters.items():
        if parameter.dim() < 2 or "conv1d" in name:
            continue
        scale = 0.03 / math.sqrt(5) if name.endswith("out_proj.weight") else 0.03  # residual: 1/sqrt(blocks)
        deviations = 4 / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(scale, rel=deviations), name
        assert abs(parameter.mean().item()) < 4 * scale / math.sqrt(parameter.numel()), name
    assert all((p == 1).all() for name, p in parameters.items() if name.endswith(("norm.weight", "norm_f.weight")))
    assert all((moe.gate.e_score_correction_bias == 0).all() for moe in model.moe_blocks())
    assert [name for name in parameters if name.endswith("bias") and "dt_bias" not in name] == [
        "backbone.layers.0.mixer.conv1d.bias", "backbone.layers.2.mixer.conv1d.bias",
    ]  # fmt: skip


def test_saved_and_loaded_model_is_the_same_to_the_bit(make_model: Callable[..., NemotronH], tmp_path: Path) -> None:
    model = make_model("MEM*-E")
    model.save_pretrained(tmp_path / "a")
    loaded = NemotronH.from_pretrained(tmp_path / "a").eval()
    assert loaded.config == model.config
    state, again = model.state_dict(), loaded.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded(ids).logits)
    loaded.save_pretrained(tmp_path / "b")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_every_expert_is_a_tensor_of_its_own_on_disk(make_model: Callable[..., NemotronH], tmp_path: Path) -> None:
    model = make_model("ME")
    model.save_pretrained(tmp_path)
    state, config = load_file(tmp_path / "model.safetensors"), model.config
    experts = model.moe_blocks()[0].experts
    for k in range(config.n_routed_experts):
        assert torch.equal(state[f"backbone.layers.1.mixer.experts.{k}.up_proj.weight"], experts.up_proj[k])
        assert torch.equal(state[f"backbone.layers.1.mixer.experts.{k}.down_proj.weight"], experts.down_proj[k])
    mamba = [f"mixer.{part}" for part in ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias")]
    moe = ["gate.weight", "gate.e_score_correction_bias", "shared_experts.up_proj.weight"]
    expected = {
        "backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight", "backbone.layers.0.norm.weight",
        "backbone.layers.1.norm.weight", *(f"backbone.layers.0.{part}" for part in mamba),
        "backbone.layers.0.mixer.norm.weight", "backbone.layers.0.mixer.out_proj.weight",
        *(f"backbone.layers.1.mixer.{part}" for part in [*moe, "shared_experts.down_proj.weight"]),
    }  # fmt: skip
    assert {name for name in state if ".experts." not in name} == expected
    assert state["backbone.layers.0.mixer.conv1d.weight"].shape == (config.mamba_conv_size, 1, config.conv_kernel)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nemotron_h"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda state: state.pop("backbone.layers.1.mixer.experts.3.up_proj.weight"), "experts.3.up_proj"),
        (lambda state: state.pop("backbone.layers.0.mixer.A_log"), "A_log"),
        (lambda state: state.update({"lm_head.weight": state["lm_head.weight"][:-1].clone()}), "lm_head"),
        (lambda state: state.update({"backbone.extra": torch.ones(1)}), "backbone.extra"),
        (
            lambda state: state.update({"backbone.layers.1.mixer.experts.5.up_proj.weight": torch.ones(14, 24)}),
            "experts",
        ),
    ],
    ids=["an expert is missing", "a tensor is missing", "another shape", "a tensor too many", "an expert too many"],
)
def test_files_that_do_not_fit_are_refused(
    make_model: Callable[..., NemotronH],
    tmp_path: Path,
    damage: Callable[[dict[str, torch.Tensor]], object],
    named: str,
) -> None:
    make_model("ME").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=named):
        NemotronH.from_pretrained(tmp_path)


def test_transformers_reads_the_saved_directory(make_model: Callable[..., NemotronH], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_model("MEM*-E")
    model.save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, use_cache=False, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    for layer in reference.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):  # a floor under dt that neither training nor our decoding has
            layer.mixer.time_step_limit = (0.0, math.inf)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dimensions", "named"),
    [
        ({"hybrid_override_pattern": "MXE"}, "MXE"),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"mamba_num_heads": 6, "n_groups": 4}, "n_groups"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(dimensions: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        NemotronHConfig(**dimensions)


@pytest.mark.parametrize("pattern", ["M", "*", "E", "-"])
def test_a_second_derivative_is_refused(make_model: Callable[..., NemotronH], pattern: str) -> None:
    """The gradients that are written down have none of their own: without this it would be wrong without a word."""
    model = make_model(pattern)
    loss = model(torch.arange(12).view(2, 6)).logits.square().sum()
    (grad,) = torch.autograd.grad(loss, model.backbone.embeddings.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_all_but_experts_compile_without_a_break(make_model: Callable[..., NemotronH]) -> None:
    """`E` cannot: how many rows an expert gets is known at run time only."""
    model, ids = make_model("M*-"), torch.arange(48).view(2, 24)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(ids).logits.square().sum(), parameters)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(ids).logits.square().sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_config_round_trip_ignores_foreign_keys() -> None:
    config = NemotronHConfig("M*", hidden_size=48, routed_scaling_factor=1.5)
    assert config_from_dict({**config.to_dict(), "model_type": "nemotron_h", "bos_token_id": 1}) == config
