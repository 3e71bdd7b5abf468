"""The head of a step saves what a resumed run needs, and ranks leave together wherever a signal finds one of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_runspec.errors import RunFailed
from nemotron.kit import MetricsLog, Progress
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.kit.stop import StopFlag, StopRequested
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.distributed import ALONE
from nemotron.stack.training.optim import build_optimizer
from nemotron.stack.training.session import Session, chosen_precision, full_gpu_in_a_line

CPU = torch.device("cpu")


def make_session(folder: Path, save_interval: int = 4, resumed: bool = False) -> Session:
    def open_log(name: str) -> MetricsLog:
        return MetricsLog(folder / f"{name}.jsonl")

    def write_state(state: str, **more: Any) -> None:
        (folder / "state.json").write_text(json.dumps({"state": state, **more}))

    run: Any = SimpleNamespace(
        dir=folder, resumed=resumed, metrics=open_log("metrics"), open_log=open_log, write_state=write_state, config={}
    )
    session = Session(
        ALONE, run, StopFlag(), Checkpoints(folder / "checkpoints", "abc"), save_interval, precision="fp32"
    )
    model: Any = torch.nn.Linear(2, 1)
    session.model, session.last_step, session.progress = model, 10, Progress(10)
    session.optimizer = build_optimizer(session.model, AdamWConfig(lr=0.1, adam_beta2=0.95, weight_decay=0.1))
    return session


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints on disk."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_a_gpu_without_memory_is_a_line_of_error() -> None:
    message = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 79 GiB of which 1 GiB is free"
    with pytest.raises(RunFailed) as failed, full_gpu_in_a_line():
        raise torch.OutOfMemoryError(f"{message}. Of the allocated memory 76 GiB is allocated by PyTorch.")
    assert failed.value.message == message
    assert "train.micro_batch_size" in str(failed.value.hint)


@pytest.mark.parametrize(("step", "due"), [(0, False), (3, False), (4, True), (8, True), (9, False), (10, True)])
def test_a_checkpoint_is_saved_at_the_head_where_it_is_due(tmp_path: Path, step: int, due: bool) -> None:
    session = make_session(tmp_path)
    with session.head_of_step(step, {}):
        assert saved(tmp_path) == ([step] if due else [])  # before what stands in the block
    assert (session.stop.checkpoint is not None) == due


def test_the_threads_of_an_update_are_chosen_before_each_and_not_behind_the_last(tmp_path: Path) -> None:
    session, log = make_session(tmp_path), list[str]()
    session.threads = SimpleNamespace(begin=lambda: log.append("begin"), end=lambda: log.append("end"))  # type: ignore[assignment]
    for step in (9, 10):
        with session.head_of_step(step, {}):
            pass
    assert log == ["end", "begin", "end"]


@pytest.mark.parametrize("async_save", [False, True])
def test_behind_the_last_step_nothing_is_held_of_the_optimizer(tmp_path: Path, async_save: bool) -> None:
    session = make_session(tmp_path)
    session.checkpoints.async_save = async_save
    session.model.weight.grad = torch.ones(1, 2)
    session.optimizer.step()
    moments = [weakref.ref(tensor) for tensor in session.optimizer.state[session.model.weight].values()]
    for step in (4, 10):
        with session.head_of_step(step, {}):
            assert all(moment() is not None for moment in moments)
    session.checkpoints.wait()
    assert saved(tmp_path) == [4, 10] and not session.checkpoints._copies
    assert not any(moment() is not None for moment in moments)


@pytest.mark.parametrize("step", [0, 3, 4])
def test_a_signal_in_the_head_saves_the_state_before_it(tmp_path: Path, step: int) -> None:
    session = make_session(tmp_path)
    session.run.metrics.log(step, loss=1.0)
    with pytest.raises(StopRequested), session.head_of_step(step, {"cursor": 7}):
        session.run.metrics.log(step, valid_loss=2.0)
        session.stop.received = signal.SIGTERM
        session.poll()
    assert saved(tmp_path) == [step] and session.stop.checkpoint is not None
    again = make_session(tmp_path, resumed=True)
    restored = again.begin("test", 10, again.model, again.optimizer)
    assert restored is not None and restored.step == step and restored.state["cursor"] == 7
    # The validation is done again, so its record is gone; that of the update before it stays.
    assert [set(record) - {"time"} for record in again.run.metrics.read()] == [{"step", "loss"}]


def test_a_signal_between_two_steps_is_answered_before_the_block(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    session.stop.received = signal.SIGINT
    with pytest.raises(StopRequested), session.head_of_step(5, {}):
        pytest.fail("the block was entered")
    assert saved(tmp_path) == [5]


@pytest.mark.parametrize(("end", "steps_saved"), [(5, [5]), (7, [])])
def test_a_head_that_makes_its_step_the_last_one_is_saved(tmp_path: Path, end: int, steps_saved: list[int]) -> None:
    """As early stopping does where no decay follows; done again, the head comes to the same end."""
    session = make_session(tmp_path)
    with session.head_of_step(5, {}):
        session.end_at(end)
    assert saved(tmp_path) == steps_saved
    again = make_session(tmp_path, resumed=True)
    restored = again.begin("test", 10, again.model, again.optimizer)
    assert (restored and restored.step, again.last_step) == (5 if steps_saved else None, 10)


def test_a_resumed_run_ends_where_the_stopped_one_was_going_to(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    with session.head_of_step(3, {}):
        session.end_at(7)
    with session.head_of_step(4, {}):
        pass
    again = make_session(tmp_path, resumed=True)
    assert again.begin("test", 10, again.model, again.optimizer) is not None
    assert again.last_step == again.progress.total == 7


def test_a_resumed_run_keeps_its_precision_on_a_processor_that_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(tmp_path)
    with session.head_of_step(4, {}):
        pass
    monkeypatch.setattr("nemotron.stack.training.session.multiplies_bf16", lambda device: True)
    assert chosen_precision("auto", CPU) == "bf16_mixed"
    assert chosen_precision("auto", CPU, session.checkpoints) == "fp32"


@pytest.mark.parametrize("multiplies", [True, False])
def test_auto_is_bf16_where_the_processor_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool
) -> None:
    monkeypatch.setattr("nemotron.stack.training.session.multiplies_bf16", lambda device: multiplies)
    empty = Checkpoints(tmp_path, "abc")  # a run that was killed before its first
    for begun in (None, empty):
        assert chosen_precision("auto", CPU, begun) == ("bf16_mixed" if multiplies else "fp32")
        assert chosen_precision("bf16_with_nvfp4_mixed", CPU, begun) == "bf16_with_nvfp4_mixed"
        assert chosen_precision("fp32", CPU, begun) == "fp32"


def test_every_log_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    samples = session.open_log("samples")
    samples.log(1, text="a")
    with session.head_of_step(4, {}):
        pass
    session.run.metrics.log(5, loss=1.0)
    samples.log(5, text="b")
    again = make_session(tmp_path, resumed=True)
    samples = again.open_log("samples")
    again.begin("test", 10, again.model, again.optimizer)
    assert ([r["step"] for r in samples.read()], again.run.metrics.read()) == ([1], [])


def test_trackers_get_what_is_logged_after_training_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    with session.head_of_step(4, {}):
        pass
    again = make_session(tmp_path, resumed=True)
    records: list[dict[str, Any]] = []
    starts: list[int] = []

    def open_mirrors(run: Any, start: int) -> list[SimpleNamespace]:
        assert run is again.run
        starts.append(start)
        return [SimpleNamespace(log=records.append)]

    monkeypatch.setattr("nemotron.stack.training.session.open_mirrors", open_mirrors)
    again.begin("test", 10, again.model, again.optimizer)
    again.run.metrics.log(5, loss=1.5)
    assert starts == [4] and [(record["step"], record["loss"]) for record in records] == [(5, 1.5)]


def test_a_fresh_run_drops_the_records_of_one_that_was_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    make_session(tmp_path).run.metrics.log(1, loss=1.0)
    session = make_session(tmp_path, resumed=True)
    assert session.begin("test", 10, session.model, session.optimizer) is None
    assert session.run.metrics.read() == []


@pytest.mark.slow
def test_all_ranks_leave_dealt_out_work_together(tmp_path: Path) -> None:
    """The signal reaches rank 1 in the middle of its share; rank 0 does all of its own."""
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent("""
        import json, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import test_session
        from nemotron.kit.stop import StopRequested
        from nemotron.stack.training.distributed import start_distributed, stop_distributed
        session = test_session.make_session(Path(sys.argv[1]) / "run")
        session.ranks = start_distributed()
        shares, left = [], []
        for turn in range(2):
            try:
                with session.dealt_out():
                    for piece in range(4):
                        session.stop.poll()
                        shares.append(piece)
                        if session.ranks.rank == 1 and turn == 1 and piece == 1:
                            session.stop.received = signal.SIGUSR1
            except StopRequested as request:
                left.append([turn, request.code])
        stop_distributed()
        Path(sys.argv[1], f"{session.ranks.rank}.json").write_text(json.dumps([shares, left]))
    """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, tmp_path]
    subprocess.run([*command, Path(__file__).parent], check=True, timeout=120, capture_output=True)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results == [[[0, 1, 2, 3] * 2, [[1, 143]]], [[0, 1, 2, 3, 0, 1], [[1, 143]]]]
