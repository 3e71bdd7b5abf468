"""Checkpoints: resuming equals not stopping, bit for bit; a crash at any moment leaves a whole one; damage is named."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.training import checkpoint as module
from nemotron.stack.training.checkpoint import Checkpoints, latest_checkpoint, load_checkpoint
from nemotron.stack.training.optim import build_optimizer, set_lr

RUN = "abc"
SYNC_AND_ASYNC = pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model.register_buffer("counter", torch.zeros((), dtype=torch.int64))
    return model, build_optimizer(model, AdamWConfig(lr=0.01, adam_beta2=0.95, weight_decay=0.1))


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


def save(root: Path, step: int, keep_last: int = 2, state: dict[str, Any] | None = None) -> Path:
    """A checkpoint of a fresh model after one step of training."""
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    return Checkpoints(root, RUN, keep_last).save(step, model, optimizer, state or {})


@SYNC_AND_ASYNC
def test_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path, async_save: bool) -> None:
    model, optimizer = make()
    unbroken = train(model, optimizer, 0, 12)
    first, first_optimizer = make()
    losses = train(first, first_optimizer, 0, 5)
    best = {"weight": torch.full((2,), 7.0)}
    with Checkpoints(tmp_path, RUN, async_save=async_save) as checkpoints:
        checkpoints.save(5, first, first_optimizer, {"cursor": [1, 2]}, best)
        train(first, first_optimizer, 5, 9)  # lost in the crash
    second, second_optimizer = make(seed=99)
    restored = Checkpoints(tmp_path, RUN).load_latest(second, second_optimizer)
    assert restored is not None
    assert (restored.step, restored.state) == (5, {"cursor": [1, 2]})
    assert torch.equal(restored.tensors["weight"], best["weight"])
    losses += train(second, second_optimizer, 5, 12)
    assert losses == unbroken
    for a, b in zip(model.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_save_returns_before_a_slow_disk_is_done_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on while the writer is still held up, and changes the weights under it."""
    disk, real = threading.Event(), module._save_tensors

    def slow(path: Path, tensors: Any) -> None:
        assert disk.wait(timeout=60)
        real(path, tensors)

    (tmp_path / "sync").mkdir()
    model, optimizer = make()
    train(model, optimizer, 0, 3)
    state = {"cursor": [3]}
    Checkpoints(tmp_path / "sync", RUN).save(3, model, optimizer, state)
    monkeypatch.setattr(module, "_save_tensors", slow)
    with Checkpoints(tmp_path / "async", RUN, async_save=True) as checkpoints:
        for step in (3, 4):  # the second one writes the copies of the first anew
            checkpoints.save(step, model, optimizer, state)
            assert latest_checkpoint(tmp_path / "async") == (None if step == 3 else tmp_path / "async/step-00000003")
            train(model, optimizer, step, step + 1)
            state["cursor"].append(step)
            disk.set()
            checkpoints.wait()
            assert latest_checkpoint(tmp_path / "async") == tmp_path / f"async/step-{step:08d}"
            disk.clear()
        disk.set()
    for name in ("model", "optimizer", "rng"):
        path = Path("step-00000003") / f"{name}.safetensors"
        assert (tmp_path / "async" / path).read_bytes() == (tmp_path / "sync" / path).read_bytes()
    record = json.loads((tmp_path / "async/step-00000003/state.json").read_text())
    assert record["state"] == {"cursor": [3]}


def test_a_save_waits_for_its_own_stream_and_not_for_one_that_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses to wait for a device of which a stream is being captured, as in generation ahead of the trainer."""
    stream = MagicMock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock(side_effect=RuntimeError("stream is capturing")))
    save(tmp_path, 1)
    assert stream.synchronize.called


def test_an_error_in_the_background_comes_up_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path, 1)
    model, optimizer = make()

    def full(path: Path, tensors: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_save_tensors", full)
        checkpoints = Checkpoints(tmp_path, RUN, async_save=True)
        checkpoints.save(2, model, optimizer, {})
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(3, model, optimizer, {})
        with pytest.raises(OSError, match="No space left"), Checkpoints(tmp_path, RUN, async_save=True) as other:
            other.save(2, model, optimizer, {})  # at exit, the loop being over
    assert latest_checkpoint(tmp_path) == good
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", good.name]


def test_a_second_ctrl_c_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr(module, "_save_tensors", lambda *_: disk.wait(timeout=60))
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path, RUN, async_save=True) as checkpoints:
        checkpoints.save(1, *make(), {})
        raise KeyboardInterrupt
    assert not disk.is_set()
    disk.set()


def test_keep_last_and_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (10, 20, 30, 40):
        path = save(tmp_path, step)
        assert latest_checkpoint(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000030", "step-00000040"]
    shutil.rmtree(tmp_path / "step-00000040")  # as the hint for a damaged one says
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000030"
    shutil.rmtree(tmp_path / "step-00000030")
    with pytest.raises(UserError, match="step-00000040"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("keep_last", [1, 2, 3, 6])
def test_so_many_checkpoints_stay_as_are_to_be_kept(tmp_path: Path, keep_last: int) -> None:
    for number in range(1, 6):
        save(tmp_path, number, keep_last)
        assert len(list(tmp_path.glob("step-*"))) == min(number, keep_last)


def test_the_checkpoint_just_written_stays_whatever_a_kill_has_left(tmp_path: Path) -> None:
    for step in (200, 300):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000200\n")  # killed between the renames of 300 and of `latest`
    path = save(tmp_path, 250, keep_last=1)
    assert latest_checkpoint(tmp_path) == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000250"]


@SYNC_AND_ASYNC
@pytest.mark.parametrize("dies_in", ["_save_tensors", "write_in_one_step", "fsync_directory"])
def test_death_while_writing_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str, async_save: bool
) -> None:
    good = save(tmp_path, 1)
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
                checkpoints = Checkpoints(tmp_path, RUN, keep_last=1, async_save=async_save)
                checkpoints.save(2, *make(), {})
                checkpoints.wait()
        latest = latest_checkpoint(tmp_path)
        assert latest is not None and latest.name in (good.name, "step-00000002")
        load_checkpoint(latest, *make(), RUN)
    save(tmp_path, 2, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoints = Checkpoints(tmp_path, RUN)
    path = checkpoints.save(4, model, optimizer, {"first": True})
    assert checkpoints.save(4, model, optimizer, {"first": False}) == path
    assert load_checkpoint(path, model, optimizer, RUN).state == {"first": True}


def test_before_the_first_step_the_optimiser_has_no_state(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, RUN).save(0, *make(), {})
    assert load_checkpoint(path, *make(), RUN).step == 0


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(UserError, match="is of run abc, not of this one, def\n"):
        load_checkpoint(path, *make(), "def")


# ---- damage


def truncate(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Damage that size and digest do not show: another file, with its own size and digest in the record."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        sign(path)

    return damage


def sign(path: Path) -> None:
    record = json.loads((path.parent / "state.json").read_text())
    record.pop("sha256")
    record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (path.parent / "state.json").write_text(json.dumps({**record, "sha256": module._digest(record)}))


def plant_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0] * 9}))


def plant_torch_archive(path: Path) -> None:
    torch.save({"0.weight": torch.zeros(8, 4)}, path)
    sign(path)


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        pytest.param(MODEL, truncate, r"damaged: \d+ bytes, \d+ expected", id="truncated"),
        pytest.param(OPTIMIZER, truncate, r"damaged: \d+ bytes, \d+ expected", id="truncated optimiser"),
        pytest.param("rng.safetensors", flip_bit, "damaged: .*sha256", id="flipped bit in random states"),
        pytest.param(MODEL, flip_bit, "damaged: .*sha256", id="flipped bit"),
        pytest.param(MODEL, Path.unlink, "is missing", id="missing file"),
        pytest.param(
            MODEL, rewrite(lambda t: t.update({"0.weight": torch.zeros(8, 5)})),
            "0.weight is float32 8x5, float32 8x4 expected", id="shape",
        ),
        pytest.param(
            MODEL, rewrite(lambda t: t.update({"0.bias": t["0.bias"].bfloat16()})),
            "0.bias is bfloat16 8, float32 8 expected", id="dtype",
        ),
        pytest.param(MODEL, rewrite(lambda t: t.pop("2.bias")), "2.bias is missing", id="missing tensor"),
        pytest.param(
            MODEL, rewrite(lambda t: t.update({"3.bias": torch.zeros(1)})), "3.bias is unknown", id="unknown tensor"
        ),
        pytest.param(
            OPTIMIZER, rewrite(lambda t: t.update({"0.weight:exp_avg": torch.zeros(4, 8)})),
            "0.weight:exp_avg is float32 4x8, float32 8x4 expected", id="shape of a moment",
        ),
        pytest.param(
            OPTIMIZER, rewrite(lambda t: t.pop("2.bias:exp_avg")), "2.bias:exp_avg is missing", id="missing moment"
        ),
        pytest.param(
            OPTIMIZER, rewrite(lambda t: t.update({"9.bias:step": torch.zeros(())})), "9.bias:step is unknown",
            id="unknown moment",
        ),
        pytest.param(MODEL, plant_pickle, r"damaged: \d+ bytes, \d+ expected", id="pickle"),
        pytest.param(MODEL, plant_torch_archive, "damaged: Error while deserializing header", id="torch archive"),
        pytest.param("optimizer.pt", plant_pickle, "is no file of this checkpoint", id="pickle beside"),
        pytest.param("state.json", truncate, "damaged: not the record", id="truncated record"),
        pytest.param(
            "state.json", lambda p: p.write_text(p.read_text().replace('"cursor": 12', '"cursor": 13')),
            "damaged: .*sha256", id="changed record",
        ),
        pytest.param("state.json", lambda p: p.write_text("[]"), "damaged: not the record", id="another record"),
    ],
)  # fmt: skip
def test_damage_is_named_with_file_and_way_out(
    tmp_path: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    older, newest = (save(tmp_path, step, state={"cursor": 12}) for step in (1, 2))
    damage(newest / file)
    with pytest.raises(UserError, match=message) as caught:
        Checkpoints(tmp_path, RUN).load_latest(*make())
    assert caught.value.message.startswith(f"{newest / file}: ") and "\n" not in caught.value.message
    assert caught.value.hint == f"rm -r {newest}; the same command then goes on from {older.name}"
    shutil.rmtree(newest)
    restored = Checkpoints(tmp_path, RUN).load_latest(*make())
    assert restored is not None and restored.step == 1
    damage(older / file)
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path, RUN).load_latest(*make())
    assert caught.value.hint == f"rm -r {tmp_path}; the same command then starts afresh"


def test_no_pickle_on_disk(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
