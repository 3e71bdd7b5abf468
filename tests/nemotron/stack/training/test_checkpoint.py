"""Checkpoints: resuming equals not stopping, bit for bit; a crash at any moment leaves a whole one."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_runspec.errors import UserError
from nemotron.stack.training import checkpoint as module
from nemotron.stack.training.checkpoint import config_changes, latest_checkpoint, load_checkpoint, save_checkpoint
from nemotron.stack.training.optim import build_optimizer, set_lr

CONFIG = {
    "optimizer": {"lr": 0.01},
    "run": {"name": "a", "data": "d:1"},
    "train": {"style": "WSD"},
    "logger": {"log_interval": 5},
}


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    return model, build_optimizer(model, 0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        set_lr(optimizer, 0.01 / (step + 1))
        loss = model(torch.randn(16, 4)).square().mean()  # data and dropout come from the global random state
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.counter += 1
        losses.append(loss.item())
    return losses


def test_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make()
    unbroken = train(model, optimizer, 0, 12)
    first, first_optimizer = make()
    losses = train(first, first_optimizer, 0, 5)
    best = {"weight": torch.full((2,), 7.0)}
    save_checkpoint(tmp_path, 5, first, first_optimizer, {"cursor": [1, 2]}, CONFIG, best)
    train(first, first_optimizer, 5, 9)  # lost in the crash
    second, second_optimizer = make(seed=99)
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    restored = load_checkpoint(latest, second, second_optimizer, CONFIG)
    assert (restored.step, restored.state) == (5, {"cursor": [1, 2]})
    assert torch.equal(restored.best_model["weight"], best["weight"])
    losses += train(second, second_optimizer, 5, 12)
    assert losses == unbroken
    for a, b in zip(model.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_keep_last_and_latest(tmp_path: Path) -> None:
    model, optimizer = make()
    assert latest_checkpoint(tmp_path) is None
    for step in (10, 20, 30, 40):
        path = save_checkpoint(tmp_path, step, model, optimizer, {}, CONFIG, keep_last=2)
        assert latest_checkpoint(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000030", "step-00000040"]
    shutil.rmtree(tmp_path / "step-00000040")
    with pytest.raises(UserError, match="step-00000040"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("dies_in", ["_save_tensors", "_write_text", "_fsync_directory"])
def test_death_while_writing_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    model, optimizer = make()
    good = save_checkpoint(tmp_path, 1, model, optimizer, {}, CONFIG)
    real = getattr(module, dies_in)
    for survive in range(5):  # die at the first, second, ... call
        calls = iter(range(100))

        def dying(*args: object, survive: int = survive, calls: Iterator[int] = calls) -> None:
            if next(calls) == survive:
                patch.setattr(module.shutil, "rmtree", lambda *a, **k: None)  # a killed process cleans nothing up
                raise KeyboardInterrupt
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, dies_in, dying)
            with contextlib.suppress(KeyboardInterrupt):
                save_checkpoint(tmp_path, 2, model, optimizer, {}, CONFIG, keep_last=1)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None and latest.name in (good.name, "step-00000002")
        load_checkpoint(latest, *make(), CONFIG)
    save_checkpoint(tmp_path, 2, model, optimizer, {}, CONFIG, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_changed_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    model, optimizer = make()
    path = save_checkpoint(tmp_path, 1, model, optimizer, {}, CONFIG)
    changed = json.loads(json.dumps(CONFIG))
    changed["run"]["data"], changed["logger"]["log_interval"] = "d:2", 1
    load_checkpoint(path, model, optimizer, changed)  # neither touches the numbers
    changed["optimizer"]["lr"], changed["train"]["style"] = 0.02, "cosine"
    with pytest.raises(UserError, match=r'optimizer\.lr 0\.01 -> 0\.02; train\.style "WSD" -> "cosine"\n'):
        load_checkpoint(path, model, optimizer, changed)


def test_config_changes_lists_added_and_removed_keys() -> None:
    assert config_changes({"a": {"x": 1}, "b": [1, 2]}, {"a": {"y": 1}, "b": [1, 2]}) == [
        "a.x 1 -> (absent)",
        "a.y (absent) -> 1",
    ]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model, optimizer = make()
    path = save_checkpoint(tmp_path, 1, model, optimizer, {}, CONFIG)
    whole = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"optimizer\.safetensors: missing or damaged"):
        load_checkpoint(path, model, optimizer, CONFIG)
    (path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state\.json: cannot be read"):
        load_checkpoint(path, model, optimizer, CONFIG)


def test_no_pickle_on_disk(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *make(), {}, CONFIG)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
