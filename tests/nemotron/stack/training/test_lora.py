"""Adapters: what they add, what they leave alone, that merging changes nothing, and that PEFT reads what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.kit.schemas.peft import PeftConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.lora_linear import lora_layers
from nemotron.stack.models.published.peft_adapter import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from nemotron.stack.training.checkpoint import Checkpoints, load_checkpoint
from nemotron.stack.training.lora import add_lora, count_lora_parameters, merge_lora
from nemotron.stack.training.optim import build_optimizer

SUPER: dict[str, Any] = {"moe_latent_size": 10, "num_nextn_predict_layers": 1, "initializer_range": 0.2}
IDS = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(3))


class Base:
    """The record of a frozen model, as far as `save_adapter` reads it."""

    ref = "my-model:3"
    sources: tuple[Any, ...] = ()


def peft(**values: Any) -> PeftConfig:
    return PeftConfig(peft_scheme="lora", **({"dim": 3, "alpha": 6} | values))


@pytest.fixture
def adapted(small_model: Callable[..., NemotronH]) -> Callable[..., NemotronH]:
    """`adapted(pattern, dtype=…, **values of PeftConfig)`: a model with adapters that are away from zero."""

    def make(pattern: str = "MEM*E-", dtype: torch.dtype = torch.float64, **values: Any) -> NemotronH:
        model = small_model(pattern, seed=1, **SUPER).to(dtype)
        add_lora(model, peft(**values))
        with torch.no_grad():
            for _, layer in lora_layers(model):
                layer.lora_B.normal_(0, 0.2)
        return model

    return make


def logits(model: NemotronH) -> list[Tensor]:
    with torch.no_grad():
        out = model(IDS, mtp_depths=2)
    return [out.logits, *out.mtp_logits]


def test_training_begins_at_the_frozen_model_to_the_bit(small_model: Callable[..., NemotronH]) -> None:
    model = small_model("MEM*E-", **SUPER)
    before = logits(model)
    add_lora(model, peft())
    assert all(torch.equal(one, other) for one, other in zip(before, logits(model), strict=True))
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (["linear_qkv"], {"q_proj", "k_proj", "v_proj"}),
        (["linear_proj"], {"o_proj"}),
        (["linear_fc1", "linear_fc2"], {"up_proj", "down_proj"}),
        (["in_proj", "out_proj"], {"in_proj", "out_proj"}),
    ],
)
def test_published_names_are_these_modules_and_as_many_values(
    small_model: Callable[..., NemotronH],
    small_config: Callable[..., NemotronHConfig],
    modules: list[Any],
    names: set[str],
) -> None:
    model, settings = small_model("MEM*E-", **SUPER), peft(target_modules=modules)
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name.split(".")[-2] in names  # stacked experts are parameters of `experts` itself
    }
    add_lora(model, settings)
    assert {f"{path}.weight" for path, _ in lora_layers(model)} == shapes.keys()
    expected = sum(settings.dim * (rows + columns) for rows, columns in shapes.values())
    assert expected == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert expected == count_lora_parameters(small_config("MEM*E-", **SUPER), settings)


def test_a_model_without_such_a_module_is_refused(small_model: Callable[..., NemotronH]) -> None:
    with pytest.raises(ValueError, match="no block of MM has one of"):
        add_lora(small_model("MM"), peft(target_modules=["linear_qkv"]))


def test_gradients_follow_from_those_of_the_merged_weight(adapted: Callable[..., NemotronH]) -> None:
    """With G the gradient of W + s B A: that of B is s G A^T, that of A is s B^T G, and a frozen weight has none."""
    model, merged = adapted(), adapted()
    merged.load_state_dict(model.state_dict())
    layers = dict(lora_layers(model))
    merge_lora(merged)
    for each in (model, merged):
        out = each(IDS, mtp_depths=2)
        (out.logits.square().mean() + sum(of_depth.square().mean() for of_depth in out.mtp_logits)).backward()
    for path, layer in layers.items():
        gradient = merged.get_submodule(path).weight.grad
        assert isinstance(gradient, Tensor) and layer.weight.grad is None
        torch.testing.assert_close(layer.lora_B.grad, 2 * gradient @ layer.lora_A.T, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(layer.lora_A.grad, 2 * layer.lora_B.T @ gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_merged_logits_are_equal_to_rounding(
    adapted: Callable[..., NemotronH], dtype: torch.dtype, tolerance: float
) -> None:
    model = adapted(dtype=dtype)
    with_adapters, names = logits(model), set(model.state_dict())
    merge_lora(model)
    for one, other in zip(with_adapters, logits(model), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert set(model.state_dict()) == {name for name in names if "lora_" not in name}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_stored_in_bf16_are_rounded_once(adapted: Callable[..., NemotronH]) -> None:
    model = adapted(dtype=torch.bfloat16)
    exact = {}
    for path, layer in lora_layers(model):
        assert (layer.weight.dtype, layer.lora_A.dtype) == (torch.bfloat16, torch.float32)
        exact[path] = layer.weight.double() + 2 * layer.lora_B.double() @ layer.lora_A.double()
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS).logits.float().square().mean().backward()
    assert all(layer.lora_A.grad is not None for path, layer in lora_layers(model) if not path.startswith("mtp"))
    merge_lora(model)
    for path, weight in exact.items():
        rounded = model.get_submodule(path).weight
        assert isinstance(rounded, Tensor) and rounded.dtype == torch.bfloat16
        assert ((rounded.double() - weight).abs() <= weight.abs() * 2**-8).all()  # half a unit of 8 bits, and fp32's


def test_an_update_moves_adapters_only_and_a_checkpoint_holds_nothing_else(
    adapted: Callable[..., NemotronH], tmp_path: Path
) -> None:
    settings = AdamWConfig(lr=0.01, adam_beta2=0.95, weight_decay=0.1)
    model = adapted(dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = build_optimizer(model, settings)

    def update(each: NemotronH, its: torch.optim.Optimizer) -> None:
        each(IDS, mtp_depths=2).logits.square().mean().backward()
        its.step()
        its.zero_grad()

    update(model, optimizer)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all("lora_" in name for name in moved)
    path = Checkpoints(tmp_path, "run").save(1, model, optimizer, {})
    saved = set(load_file(path / "model.safetensors"))
    buffers = {name for name in saved if name.endswith("e_score_correction_bias")}
    assert saved - buffers == {name for name in before if "lora_" in name} and len(buffers) == 3
    # Another process: the frozen model from where it was, the adapters from the checkpoint.
    resumed = adapted(dtype=torch.float32)
    resumed_optimizer = build_optimizer(resumed, settings)
    load_checkpoint(path, resumed, resumed_optimizer, "run")
    update(model, optimizer)
    update(resumed, resumed_optimizer)
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_the_layout_is_that_of_peft(adapted: Callable[..., NemotronH], tmp_path: Path) -> None:
    model = adapted("M*E")
    save_adapter(tmp_path / "adapter", model, peft(), Base())  # type: ignore[arg-type]
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6, "my-model:3")
    assert config["modules_to_save"] == ["mixer.out_proj"]
    assert config["target_modules"] == [
        "mixer.in_proj", "mixer.k_proj", "mixer.o_proj", "mixer.q_proj",
        "mixer.shared_experts.down_proj", "mixer.shared_experts.up_proj", "mixer.v_proj",
    ]  # fmt: skip
    stored = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    prefix = "base_model.model.model.layers.0.mixer"
    assert torch.equal(stored[f"{prefix}.in_proj.lora_A.weight"], model.backbone.layers[0].mixer.in_proj.lora_A)
    weight = model.backbone.layers[0].mixer.out_proj.merged_weight()
    assert torch.equal(stored[f"{prefix}.out_proj.weight"], weight)


@pytest.mark.parametrize("modules", [None, ["linear_fc1", "in_proj"]], ids=["published", "some"])
def test_peft_reads_the_adapter_to_the_same_logits(
    adapted: Callable[..., NemotronH], tmp_path: Path, modules: list[str] | None
) -> None:
    transformers, library = pytest.importorskip("transformers"), pytest.importorskip("peft")
    values = {} if modules is None else {"target_modules": modules}
    model = adapted(dtype=torch.float32, **values)
    save_adapter(tmp_path / "adapter", model, peft(**values), Base())  # type: ignore[arg-type]
    frozen = NemotronH(model.config)
    frozen.load_state_dict({name: t for name, t in model.state_dict().items() if "lora_" not in name})
    frozen.save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    read = library.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs, ours, without = read(IDS, use_cache=False).logits, model(IDS).logits, frozen(IDS).logits
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)
    assert (ours - without).abs().max() > 0.1
