"""Plans, receipts, and what is left after a death in the middle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine
from nemotron.data_prep.work.shards import (
    PARTS,
    InputFile,
    OutputFile,
    Plan,
    Receipt,
    Shard,
    ShardOutput,
    discard,
    freeze,
    read_receipt,
    run_shards,
)


@dataclass(frozen=True)
class Number:
    n: int


@dataclass
class Tally:
    """Counts with everything that those of tasks are made of."""

    square: int
    names: list[str] = field(default_factory=list)
    by_name: dict[str, Number] = field(default_factory=dict)
    counter: Counter[str] = field(default_factory=Counter)


def plan_of(numbers: int, **settings: Any) -> Plan[Number]:
    inputs = [InputFile(f"/data/{n}", n, "1") for n in range(numbers)]
    return Plan({"eos": True, **settings}, inputs, [Shard(f"s-{n}", Number(n)) for n in range(numbers)])


def run(plan: Plan[Number], folder: Path, function: Any, shared: Path, engine: Engine) -> list[Receipt[Tally]]:
    return [receipt for receipt, _ in run_shards(plan, folder, function, shared, engine, Tally)]


def squares(shard: Shard[Number], shared: Path, output: ShardOutput) -> Tally:
    n = shard.work.n
    with (shared / "log").open("a") as log:
        log.write(f"{n}\n")
    output.path(f"deep/{shard.name}.txt").write_text(str(n * n))
    output.path("never-written")
    # Half a surrogate pair, as names of files have it that are not UTF-8.
    return Tally(n * n, ["\udcff.txt"], {shard.name: shard.work}, Counter({"seen": n}))


def fails_at_3(shard: Shard[Number], shared: Path, output: ShardOutput) -> Tally:
    if shard.work.n == 3:
        output.path("half").write_text("half of it")
        raise UserError("/data/3:17: malformed")
    return squares(shard, shared, output)


def disk_is_full(shard: Shard[Number], shared: Path, output: ShardOutput) -> Tally:
    output.path("half").write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def input_is_gone(shard: Shard[Number], shared: Path, output: ShardOutput) -> Tally:
    Path("/no/such/input").read_text()
    raise AssertionError


def done(folder: Path, shared: Path) -> list[str]:
    log = shared / "log"
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_every_shard_has_its_files_and_its_receipt_in_order(tmp_path: Path) -> None:
    plan, folder = plan_of(5), tmp_path / "work"
    freeze(plan, folder)
    receipts = run(plan, folder, squares, tmp_path, SerialEngine())
    assert [receipt.shard for receipt in receipts] == [f"s-{n}" for n in range(5)]
    assert [receipt.counts.square for receipt in receipts] == [0, 1, 4, 9, 16]
    assert (folder / "deep" / "s-4.txt").read_text() == "16"
    assert receipts[4].outputs == {
        "deep/s-4.txt": OutputFile(2, hashlib.sha256(b"16").hexdigest())
    }  # a name without a file is left out
    assert not (folder / PARTS).exists()


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    plan, folder = plan_of(5), tmp_path / "work"
    freeze(plan, folder)
    first = run(plan, folder, squares, tmp_path, SerialEngine())
    assert len(done(folder, tmp_path)) == 5
    freeze(plan, folder)
    again = list(run_shards(plan, folder, squares, tmp_path, SerialEngine(), Tally))
    assert again == [(receipt, True) for receipt in first]
    assert done(folder, tmp_path) == []


@pytest.mark.parametrize("damage", ["gone", "other byte", "shorter", "receipt cut", "receipt of another plan"])
def test_a_damaged_shard_is_done_again_and_no_other(tmp_path: Path, damage: str) -> None:
    plan, folder = plan_of(3), tmp_path / "work"
    freeze(plan, folder)
    before = run(plan, folder, squares, tmp_path, SerialEngine())
    done(folder, tmp_path)
    (folder / "receipts" / ".s-1.json-17-abcd").write_text("{")  # a kill between writing and naming
    file, receipt = folder / "deep" / "s-1.txt", folder / "receipts" / "s-1.json"
    if damage == "gone":
        file.unlink()
    elif damage == "other byte":
        file.write_text("2")
    elif damage == "shorter":
        file.write_text("")
    elif damage == "receipt cut":
        receipt.write_text(receipt.read_text()[:40])
    else:
        receipt.write_text(receipt.read_text().replace(plan.digest, "0" * 64))
    assert read_receipt(folder, "s-1", plan.digest, Tally) is None
    assert run(plan, folder, squares, tmp_path, SerialEngine()) == before
    assert done(folder, tmp_path) == ["1"]
    assert sorted(path.name for path in receipt.parent.iterdir()) == ["s-0.json", "s-1.json", "s-2.json"]


@pytest.mark.parametrize("engine", [SerialEngine(), PoolEngine(2)], ids=["serial", "pool"])
def test_an_error_keeps_what_is_done_and_leaves_nothing_half(tmp_path: Path, engine: SerialEngine | PoolEngine) -> None:
    plan, folder = plan_of(6), tmp_path / "work"
    freeze(plan, folder)
    with engine:
        with pytest.raises(UserError, match="/data/3:17: malformed"):
            run(plan, folder, fails_at_3, tmp_path, engine)
        assert not (folder / "half").exists()
        assert {"s-0.json", "s-1.json", "s-2.json"} <= {path.name for path in (folder / "receipts").iterdir()}
        done(folder, tmp_path)
        run(plan, folder, squares, tmp_path, engine)
    again = done(folder, tmp_path)
    assert "3" in again
    assert not {"0", "1", "2"} & set(again)


def test_a_full_disk_is_one_line_and_leaves_no_part(tmp_path: Path) -> None:
    plan, folder = plan_of(2), tmp_path / "work"
    freeze(plan, folder)
    with pytest.raises(RunFailed, match="cannot write: No space left on device"):
        run(plan, folder, disk_is_full, tmp_path, SerialEngine())
    assert not (folder / "half").exists()
    assert list((folder / PARTS).iterdir()) == []


def test_a_missing_input_is_not_called_a_write_error(tmp_path: Path) -> None:
    plan, folder = plan_of(2), tmp_path / "work"
    freeze(plan, folder)
    with pytest.raises(FileNotFoundError, match="/no/such/input"):
        run(plan, folder, input_is_gone, tmp_path, SerialEngine())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (plan_of(4), "/data/3 was not there when this run began"),
        (plan_of(2), "/data/2 was there when this run began, and is gone"),
        (plan_of(3, eos=False), "made with another value of eos"),
        (
            Plan(plan_of(3).settings, [*plan_of(3).inputs[:2], replace(plan_of(3).inputs[2], version="2")], []),
            "/data/2 has changed since this run began",
        ),
        (Plan(plan_of(3).settings, plan_of(3).inputs, []), "another division"),
        (
            Plan({}, [InputFile("https://h.example/x?signature=s3cr3t", 1, "1")], []),
            r"https://h\.example/x was not there when this run began",
        ),
    ],
)
def test_a_frozen_plan_refuses_another(tmp_path: Path, other: Plan[Number], message: str) -> None:
    freeze(plan_of(3), tmp_path)
    with pytest.raises(UserError, match=message):
        freeze(other, tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(UserError, match="not a plan of this run"):
        freeze(plan_of(3), tmp_path)


def test_the_digest_is_of_the_content() -> None:
    assert plan_of(3).digest == plan_of(3).digest
    assert len({plan_of(3).digest, plan_of(4).digest, plan_of(3, eos=False).digest}) == 3


KILLED = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from nemotron.data_prep.work.engines import PoolEngine
from nemotron.data_prep.work.shards import Plan, Shard, freeze, run_shards

@dataclass(frozen=True)
class Number:
    n: int

def slow(shard, shared, output):
    with output.path(f"{shard.name}.bin").open("wb") as file:
        for i in range(20):
            file.write(bytes([shard.work.n]) * 1000)
            file.flush()
            time.sleep(0.002)
    return shard.work

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plan = Plan({}, [], [Shard(f"s{n:02}", Number(n)) for n in range(24)])
    with PoolEngine(2) as engine:
        freeze(plan, folder)
        print("ready", flush=True)
        for receipt in run_shards(plan, folder, slow, None, engine, Number):
            pass
"""


def test_killed_again_and_again_it_ends_with_the_same_files(tmp_path: Path) -> None:
    script, folder = tmp_path / "work.py", tmp_path / "out"
    script.write_text(KILLED)
    dice = random.Random(7)
    deaths = 0
    for _ in range(60):
        process = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(dice.uniform(0.0, 0.3))
        if process.poll() is None and deaths < 6:
            process.send_signal(signal.SIGKILL)
            deaths += 1
            process.wait()
            continue
        assert process.wait() == 0
        break
    assert deaths == 6
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == sorted(
        ["plan.json", *(f"receipts/s{n:02}.json" for n in range(24)), *(f"s{n:02}.bin" for n in range(24))]
    )
    for n in range(24):
        assert (folder / f"s{n:02}.bin").read_bytes() == bytes([n]) * 20_000
        assert (
            json.loads((folder / "receipts" / f"s{n:02}.json").read_text())["outputs"][f"s{n:02}.bin"]["bytes"]
            == 20_000
        )


def test_discarded_work_is_gone_from_its_place_before_a_file_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"

    def make() -> None:
        work.mkdir()
        (work / "plan.json").write_text("{}")

    def stopped(folder: Path, ignore_errors: bool = False) -> None:
        assert not work.exists() or not folder.exists()
        if folder.exists():
            raise SystemExit(143)

    make()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(shutil, "rmtree", stopped)
        discard(work)
    make()
    discard(work)  # with what was left the first time
    assert not list(tmp_path.iterdir())
