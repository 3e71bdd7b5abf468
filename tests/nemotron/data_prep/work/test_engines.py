"""Engines: results in order whoever computes them, errors with their item, never far ahead, no worker left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.work import engines
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine, open_engine

SOURCE_ROOT = Path(engines.__file__).parents[3]
ENGINES = [SerialEngine(), PoolEngine(1), PoolEngine(3)]
IDS = ["serial", "pool of 1", "pool of 3"]


def slow_when_even(item: int, shared: str) -> tuple[str, int]:
    time.sleep(0.02 * (item % 2 == 0))
    return shared, item * item


def process_id(item: int, shared: None) -> int:
    time.sleep(0.02)
    return os.getpid()


def refuse_from(item: int, first: int) -> int:
    if item >= first:
        raise UserError(f"file.jsonl:{item}: bad", "do this")
    return item


def divide(item: int, shared: None) -> float:
    return 1 / (item - 5)


def die_once(item: int, folder: str) -> int:
    marker = Path(folder) / str(item)
    if item % 4 == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def die(item: int, shared: None) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
@pytest.mark.parametrize("count", [0, 1, 2, 25])
def test_results_come_in_order(engine: Engine, count: int) -> None:
    with engine:
        for shared in ("a", "b"):  # a second map has another shared value
            results = engine.map_ordered(slow_when_even, range(count), shared)
            assert list(results) == [(shared, i * i) for i in range(count)]


def test_a_pool_uses_other_processes_and_ends_them() -> None:
    with PoolEngine(3) as engine:
        workers = set(engine.map_ordered(process_id, range(12), None))
        assert len(workers) == 3 and os.getpid() not in workers and all(map(alive, workers))
    assert not any(map(alive, workers))


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_items_are_read_as_they_are_needed(engine: Engine) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for i in range(200):
            read.append(i)
            yield i

    with engine:
        results = engine.map_ordered(slow_when_even, items(), "")
        for taken in range(1, 20):
            next(results)
            assert len(read) <= taken + engines.AHEAD * engine.workers + 2


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_of_several_faults_the_first_in_order_is_seen(engine: Engine) -> None:
    with engine:
        results = engine.map_ordered(refuse_from, range(40), 7)
        assert [next(results) for _ in range(7)] == list(range(7))
        with pytest.raises(UserError) as caught:
            next(results)
        assert (caught.value.message, caught.value.hint) == ("file.jsonl:7: bad", "do this")
        # The engine is still good.
        assert list(engine.map_ordered(refuse_from, range(6), 7)) == list(range(6))


@pytest.mark.parametrize("engine", ENGINES, ids=IDS)
def test_a_bug_names_its_item_and_its_line(engine: Engine) -> None:
    with engine, pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero") as caught:
        list(engine.map_ordered(divide, range(9), None))
    [note] = caught.value.__notes__
    assert note.startswith("in task 5:") and "return 1 / (item - 5)" in note


def test_the_task_of_a_killed_worker_is_repeated(tmp_path: Path) -> None:
    with PoolEngine(2) as engine:
        assert list(engine.map_ordered(die_once, range(20), str(tmp_path))) == list(range(20))
    assert len(list(tmp_path.iterdir())) == 5


def test_a_task_that_always_kills_its_worker_is_one_line() -> None:
    with PoolEngine(2) as engine, pytest.raises(RunFailed, match=r"3 worker processes died of SIGKILL over task 3"):
        list(engine.map_ordered(die, range(20), None))


def test_an_abandoned_map_leaves_nothing_behind() -> None:
    with PoolEngine(2) as engine:
        results = engine.map_ordered(slow_when_even, range(100), "old")
        next(results)
        results.close()
        assert list(engine.map_ordered(slow_when_even, range(6), "new")) == [("new", i * i) for i in range(6)]


_STOPPED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_engines import process_id
from nemo_runspec.errors import run_main
from nemotron.data_prep.work.engines import PoolEngine
from nemotron.kit.stop import stop_at_once

def main():
    with PoolEngine(2) as engine:
        for pid in engine.map_ordered(process_id, range(10_000), None):
            print(pid, flush=True)

stop_at_once()
sys.exit(run_main(main))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGKILL, -9)]
)
@pytest.mark.parametrize("to_group", [False, True], ids=["to one", "to all"])
def test_no_worker_survives_a_signal(number: signal.Signals, code: int, to_group: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _STOPPED, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )  # fmt: skip
    assert child.stdout is not None
    workers = {int(child.stdout.readline()) for _ in range(6)}
    assert len(workers) == 2
    (os.killpg if to_group else os.kill)(child.pid, number)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == code, stderr
    assert "Traceback" not in stderr
    assert len([line for line in stderr.splitlines() if line.startswith("error")]) == (code > 0)
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers))


def test_which_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(engines, "usable_cpus", lambda: 1)
    assert isinstance(open_engine(), SerialEngine)
    monkeypatch.setattr(engines, "usable_cpus", lambda: 5)
    pool = open_engine()
    assert isinstance(pool, PoolEngine) and pool.workers == 5
    monkeypatch.setattr(engines, "usable_cpus", lambda: 500)
    assert open_engine().workers == engines.MAX_PROCESSES  # type: ignore[attr-defined]
    monkeypatch.setenv("RAY_ADDRESS", "node1:6379")
    assert isinstance(open_engine(), engines.RayEngine)


def test_ray_address_without_ray_is_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "node1:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UserError, match="RAY_ADDRESS=node1:6379 is set, but Ray is not installed") as caught,
        open_engine(),
    ):
        pass
    assert install_line("ray") in str(caught.value.hint)


def test_ray_is_imported_by_nobody_who_does_not_use_it() -> None:
    code = (
        "import sys; from nemotron.data_prep.work import engines\n"
        "from nemotron.data_prep.chat import pack\nfrom nemotron.data_prep.tokens import blend\n"
        "with engines.PoolEngine(2): pass\n"
        "assert 'ray' not in sys.modules and 'multiprocessing.pool' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT)})
