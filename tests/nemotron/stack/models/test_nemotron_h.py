"""Initialisation, size and files of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_runspec.errors import UserError
from nemotron.stack.models import NemotronH, NemotronHConfig


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


@pytest.mark.parametrize(("expert", "complaint"), [(3, "is missing"), (5, "no place for")])
def test_files_that_do_not_fit_are_refused(
    make_model: Callable[..., NemotronH], tmp_path: Path, expert: int, complaint: str
) -> None:
    """Without the index, which would name what it does not list: one of five experts too few, or a sixth."""
    make_model("ME").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    state = load_file(tmp_path / "model.safetensors")
    name = f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"
    if state.pop(name, None) is None:
        state[name] = torch.ones(14, 24)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} .*{complaint}"):
        NemotronH.from_pretrained(tmp_path)


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


@pytest.mark.slow  # to import torch's compiler
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
