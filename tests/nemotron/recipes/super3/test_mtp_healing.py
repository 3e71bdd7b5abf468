"""Healing changes the block of multi-token prediction and no other byte, and refuses what it cannot work with."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from safetensors import safe_open

from nemo_runspec.artifacts import Registry
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.errors import run_main
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Checkpoint, Model, RLPrompts
from nemotron.kit.commands import command_hint
from nemotron.recipes.super3.stage2_rl.mtp_schema import MTPHealingConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.training import memory

FAMILIES = ("math", "multiple_choice")
MTP: dict[str, Any] = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-", "moe_latent_size": 12}
SCRIPT = importlib.import_module("nemotron.recipes.super3.stage2_rl.mtp_healing")
OUTPUT, RESULTS = "super3-mtp-healing-model-smoke", "super3-mtp-healing-results-smoke"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., NemotronH]) -> Registry:
    """Prompts of two families, and models in bfloat16 with the block (`start`) and without (`plain`)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [__file__])
    tasks = {split: [t for f in FAMILIES for t in generate_tasks(f, split, 9)] for split in ("train", "valid")}
    tokenizer = train_tokenizer([task.prompt + task.solution.answer for task in tasks["train"]], 400)
    for name, dimensions in (("start", MTP), ("plain", {})):
        folder = tmp_path / name
        save_tokenizer(tokenizer, folder, model_max_length=256, template="super3")
        model = small_model("M*E-", vocab_size=tokenizer.get_vocab_size(), **dimensions)
        model.save_pretrained(folder, dtype="bfloat16")
        Model(path=folder, num_steps=1, chat_template="super3").save(name)
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for split, of_split in tasks.items():
        (prompts / f"{split}.jsonl").write_text("".join(json.dumps({"task": t.to_dict()}) + "\n" for t in of_split))
    train, valid = prompts / "train.jsonl", prompts / "valid.jsonl"
    RLPrompts(path=prompts, num_examples=18, train_path=train, valid_path=valid).save("prompts")
    RLPrompts(path=prompts, num_examples=18, train_path=train).save("without-valid")
    return Registry(tmp_path / "output" / "artifacts")


def heal(*words: str) -> int:
    sys.argv = [str(SCRIPT.__file__), "--config", "smoke", "run.model=start", "run.data=prompts", *words]
    return int(run_main(SCRIPT.main, command_hint))


def stored(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Dtype and bytes of every tensor in the files of a model."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        header_size = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + header_size])
        content = path.read_bytes()[8 + header_size :]
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = entry["dtype"], content[slice(*entry["data_offsets"])]
        with safe_open(path, "pt") as file:
            assert set(file.keys()) <= tensors.keys()
    return tensors


@pytest.mark.slow
def test_all_but_the_block_stays_byte_for_byte(registry: Registry) -> None:
    assert heal("policy.optimizer.lr=0.05", "boosting.max_num_steps=3") == 0
    before = stored(registry.resolve("start").path)
    healed = registry.resolve(OUTPUT)
    after = stored(healed.path)
    assert after.keys() == before.keys() and {dtype for dtype, _ in before.values()} >= {"BF16"}
    assert {name: dtype for name, (dtype, _) in after.items()} == {name: dtype for name, (dtype, _) in before.items()}
    changed = {name for name in before if before[name] != after[name]}
    assert {name for name in before if name.startswith("mtp.")} == changed
    assert json.loads((healed.path / "config.json").read_text()) == json.loads(
        (registry.resolve("start").path / "config.json").read_text()
    )
    assert healed.record["metrics"]["responses"] == 3 * 8 and Checkpoint.load(path=healed.path).template == "super3"


def test_frozen_weights_need_no_room_for_gradients(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights in fp32; of the block what Adam takes, and the copy of its weights and moments for a checkpoint."""
    model = NemotronH.from_pretrained(registry.resolve("start").path)
    assert model.mtp is not None
    block = sum(parameter.numel() for parameter in model.mtp.parameters())
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(memory, "activation_bytes", lambda *_: 0)
    monkeypatch.setattr(memory, "decoding_bytes", lambda *_: 0)
    assert heal("mixed_precision=fp32") == 2
    state = 4 * sum(parameter.numel() for parameter in model.parameters()) + (16 + 12) * block
    assert f"{human_size(state)} of weights, gradients, moments" in capsys.readouterr().err


@pytest.mark.slow
def test_results_are_the_acceptance_lengths_of_both_models(registry: Registry) -> None:
    """On prompts that are not trained on; the second run measures first what the first one measured last."""
    words = ("policy.optimizer.lr=0.05", "boosting.num_speculative_tokens=2", "mixed_precision=fp32")
    assert heal(*words) == 0
    first = registry.resolve(RESULTS).record["metrics"]
    assert heal(*words, f"run.model={OUTPUT}") == 0
    second = registry.resolve(RESULTS).record["metrics"]
    assert first["prompts"] == 8 and first["num_speculative_tokens"] == 2  # 4 of each family
    for mode in ("greedy", "sampled"):
        one, other = (results["acceptance_length"][mode] for results in (first, second))
        assert min(one.values()) >= 1 and max(one.values()) <= 3
        assert other["before"] == pytest.approx(one["after"], abs=0.1)  # the published block is bf16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.model=plain"], r"plain:1 has no multi-token prediction \(num_nextn_predict_layers 0\)"),
        (["run.data=without-valid"], "without-valid:1 has no validation prompts"),
        (["boosting.num_prompts_per_step=1"], "num_prompts_per_step 1 is below the number of families in"),
        (["policy.max_total_sequence_length=20"], "max_total_sequence_length 20 has no room for a prompt of"),
        (["policy.generation.max_new_tokens=576"], "leaves no room for a prompt"),
        (["boosting.temperature=0"], "boosting.temperature"),
    ],
)
def test_refusals(registry: Registry, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert heal(*words) in (1, 2)
    assert re.search(said, capsys.readouterr().err)


def test_defaults_are_those_of_ultra() -> None:
    """FACTS: backbone frozen, T = 2, N = 7, 12K steps, global batch 64, up to 8K tokens."""
    run, data = {"model": "m", "data": "d"}, {"path": "d"}
    policy = {"model_name": "m", "optimizer": {"lr": 1e-5}, "generation": {"max_new_tokens": 4096}}
    cfg = MTPHealingConfig.model_validate({"run": run, "data": data, "policy": policy})
    assert (cfg.boosting.temperature, cfg.boosting.mtp_num_layers) == (2.0, 7)
    assert (cfg.boosting.max_num_steps, cfg.boosting.num_prompts_per_step) == (12_000, 64)
    assert cfg.policy.max_total_sequence_length == 8_192


@pytest.mark.parametrize("name", ["published", "tiny"])
def test_configs_keep_the_published_recipe(name: str) -> None:
    text = (Path(SCRIPT.__file__ or "").parent / "config" / "mtp_healing" / f"{name}.yaml").read_text()
    values: Any = OmegaConf.to_container(
        OmegaConf.create(text.replace("${art:data,path}", "d").replace("${art:model,path}", "m"))
    )
    values["run"].pop("processes", None)  # the launcher's
    cfg = MTPHealingConfig.model_validate(values)
    assert (cfg.boosting.temperature, cfg.boosting.mtp_num_layers) == (2.0, 7)
