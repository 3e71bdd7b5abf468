"""Data preparation killed with SIGKILL twenty times, at moments drawn at random: the same bytes as undisturbed.

Each command runs as a user would start it, on a folder of files of several formats, with a damaged one among them.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer

from .house import RECIPES, start

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]

DATA = RECIPES / "data"
WORDS = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8").split()
KILLS = 20


def sentences(dice: random.Random, n: int) -> str:
    return " ".join(dice.choices(WORDS, k=n))


def documents(folder: Path, dice: random.Random) -> None:
    """JSONL, gzip, Parquet and text; one record is no JSON."""
    lines = [json.dumps({"text": sentences(dice, 200)}) for _ in range(1500)]
    lines[700] = '{"text": "cut in the mid'
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": sentences(dice, 200)}) + "\n" for _ in range(400))
    table = pa.table({"text": [sentences(dice, 200) for _ in range(600)]})
    pq.write_table(table, folder / "c.parquet", row_group_size=50)
    (folder / "d.md").write_text(sentences(dice, 500), encoding="utf-8")


def conversations(folder: Path, dice: random.Random) -> None:
    """Several turns with reasoning; one record has no answer."""
    for name in ("a", "b", "c"):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(150):
                turns: list[dict[str, Any]] = []
                for _ in range(dice.randint(1, 3)):
                    turns.append({"role": "user", "content": sentences(dice, 20)})
                    turns.append(
                        {
                            "role": "assistant",
                            "content": sentences(dice, 30),
                            "reasoning_content": sentences(dice, 30),
                        }
                    )
                file.write(json.dumps({"messages": turns}) + "\n")
            file.write(json.dumps({"messages": [{"role": "user", "content": "nobody there?"}]}) + "\n")


COMMANDS = {
    "tokenize": (documents, DATA / "tokenize" / "tokenize_documents.py", ["shard_bytes=100000", "splits.test=0.05"]),
    "pack": (conversations, DATA / "pack" / "pack.py", ["shard_bytes=20000", "packing.seq_length=1024"]),
}


class House:
    """A folder with inputs, a registry and run directories, and the command that works in it."""

    def __init__(self, root: Path, kind: str) -> None:
        make, self.script, self.overrides = COMMANDS[kind]
        self.name = f"{kind}-data-own"
        self.root = root
        (root / "mine").mkdir(parents=True)
        make(root / "mine", random.Random(3))
        dice = random.Random(4)
        tokenizer = train_tokenizer([sentences(dice, 5000)], 600)
        save_tokenizer(tokenizer, root / "tokenizer", model_max_length=1024, template="nano3")

    def start(self, output: str) -> subprocess.Popen[str]:
        """The command, with its run directories and its registry under `output`."""
        command = [self.script, "--config", "own", "sources=[mine]", "tokenizer=tokenizer", *self.overrides]
        runs, artifacts = str(self.root / output / "runs"), str(self.root / output / "artifacts")
        return start(self.root, command, RUNSPEC_OUTPUT_ROOT=runs, RUNSPEC_ARTIFACTS_ROOT=artifacts)

    def finish(self, output: str) -> str:
        """Run to the end; the digest of what was published, all of it checked."""
        process = self.start(output)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return self.digest(output)

    def has_finished(self, output: str) -> bool:
        """Whether the last run has written down that it is finished."""
        states = [json.loads(path.read_text()) for path in (self.root / output / "runs").rglob("run.json")]
        return any(state["state"] == "finished" for state in states)

    def digest(self, output: str) -> str:
        """Digest of the payload, every byte of which is read."""
        version = Registry(self.root / output / "artifacts").resolve_verified(f"{self.name}:latest")
        return str(version.digest)


@pytest.mark.parametrize("kind", list(COMMANDS))
def test_killed_twenty_times(tmp_path: Path, kind: str) -> None:
    house = House(tmp_path, kind)
    begun = time.monotonic()
    undisturbed = house.finish("undisturbed")
    seconds = time.monotonic() - begun

    dice = random.Random(20)
    kills = finished = 0
    went_on = False
    while kills < KILLS:
        process = house.start("killed")
        # Never before the imports are over, where nothing can happen; often while shards are written.
        time.sleep(dice.uniform(0.3, 1.0) * seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            receipts = list((tmp_path / "killed" / "runs").rglob("receipts/*.json"))
            went_on = went_on or bool(receipts)
            if not house.has_finished("killed"):
                continue
            # Killed on its way out, with all done and published: what is started next is another run.
        else:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        assert house.digest("killed") == undisturbed
        shutil.rmtree(tmp_path / "killed")
        finished += 1
    assert house.finish("killed") == undisturbed
    assert went_on  # at least one kill left finished shards for the next start
    runs = tmp_path / "killed" / "runs"
    assert not list(runs.rglob("parts")), "parts of tasks that were killed"
    versions = list((tmp_path / "killed" / "artifacts" / house.name).iterdir())
    assert [path.name for path in versions if path.is_dir() and not path.name.startswith(".")] == ["1"]
