"""A user's own folder of mixed files becomes training data of every stage of nano3, by the scripts a user would run."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import nemotron.recipes
from nemo_runspec.artifacts import Registry, Version
from nemotron.stack.environments import generate_tasks

from .written import arrow, json_lines, parquet, response, warc, zstd

RECIPE = Path(nemotron.recipes.__file__).parent / "nano3"
QUICK = ("stdlib.enabled=false", "tasks.num_tasks=2000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20")
WORDS = """
    the model reads many words about rivers mountains letters and machines every single day of the year while boats
    leave the harbour and people mend their nets and wait for them to come back with the catch
"""


def prepare(stage: str, cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / stage / "data_prep.py"), "--config", "tiny", *overrides]
    places = ("RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ENV_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    environment["PYTHONPATH"] = f"{RECIPE.parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def published(cwd: Path, result: subprocess.CompletedProcess[str]) -> Version:
    assert result.returncode == 0, result.stderr
    return Registry(cwd / "output" / "artifacts").resolve(json.loads(result.stdout.splitlines()[-1])["data"])


def outcomes(version: Version, source: str) -> dict[str, int]:
    rows = version.record["metrics"]["curation"]
    return {r["outcome"]: r.get("documents", r.get("conversations")) for r in rows if r["source"] == source}


def has_trafilatura() -> bool:
    try:
        import trafilatura  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_a_folder_of_mixed_files(tmp_path: Path) -> None:
    rng = random.Random(0)

    def text() -> str:
        return " ".join(rng.choice(WORDS.split()) for _ in range(120)) + "."

    def rows() -> list[Any]:
        return [{"text": text()} for _ in range(30)]

    folder = tmp_path / "my-folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(json_lines(rows()))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(rows())))
    (folder / "c.jsonl.zst").write_bytes(zstd(json_lines(rows())))
    (folder / "deep" / "d.parquet").write_bytes(parquet(rows()))
    (folder / "deep" / "e.arrow").write_bytes(arrow(rows()))
    (folder / "deep" / "f.md").write_text(f"# Notes\n\n{text()}\n")
    pages = [
        response(f"http://e.org/{i}", f"<html><body><article><p>{text()}<p>{text()}</article></body></html>".encode())
        for i in range(5 if has_trafilatura() else 0)
    ]
    texts = [("conversion", f"http://e.org/{i}", text().encode(), None) for i in range(5)]
    (folder / "g.warc.gz").write_bytes(warc([*pages, *texts]))
    (folder / "table.csv").write_text("a,b\n")
    source = "sources=[{name: mine, paths: [my-folder], weight: 0.3%s}]"
    result = prepare("stage0_pretrain", tmp_path, *QUICK, source % "")
    assert "not read: 1 x .csv" in result.stderr
    first = published(tmp_path, result)
    expected = 5 * 30 + 1 + len(pages) + len(texts)
    assert outcomes(first, "mine") == {
        "read": expected, "kept": expected, "not read: WARC record of another kind": 1
    }  # fmt: skip
    assert len([s for s in first.record["sources"] if s["name"].startswith(str(folder))]) == 7

    # Changed files make another run; a bad line stops it, or is counted.
    (folder / "a.jsonl").write_bytes(json_lines(rows()) + b"{\n")
    stopped = prepare("stage0_pretrain", tmp_path, *QUICK, source % "")
    assert stopped.returncode == 2
    assert stopped.stderr.splitlines()[-2].startswith(f"error: {folder}/a.jsonl:31: malformed JSON")
    assert "on_error: skip leaves such out" in stopped.stderr.splitlines()[-1]
    second = published(tmp_path, prepare("stage0_pretrain", tmp_path, *QUICK, source % ", on_error: skip"))
    assert outcomes(second, "mine")["not read: malformed JSON"] == 1
    assert outcomes(second, "mine")["read"] == expected

    # --- Conversations for SFT, with the tokenizer of above; tasks for RL -------------------------------------------
    chats: list[Any] = [
        {"talk": {"turns": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}!"}]}}
        for i in range(40)
    ]
    bad = [{"talk": {"turns": [{"role": "usr", "content": "x"}]}}, {"talk": {}}]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(chats[:20] + bad)))
    (tmp_path / "chats" / "b.parquet").write_bytes(parquet(chats[20:]))
    own = "sources=[{name: chats, paths: [chats], messages_field: talk.turns, on_error: skip}]"
    sft = published(tmp_path, prepare("stage1_sft", tmp_path, "tasks.num_tasks=500", "packing.seq_length=256", own))
    assert outcomes(sft, "chats") == {
        "read": 42, "kept": 40, "unknown role": 1, "field is missing": 1
    }  # fmt: skip
    assert sum(len(row["seq_start_id"]) for row in pq.read_table(sft.path / "train").to_pylist()) > 40

    tasks = [task.to_dict() for task in generate_tasks("math", "train", 6)]
    renamed = [{"question" if key == "prompt" else key: value for key, value in task.items()} for task in tasks]
    wrong = {**renamed[0], "solution": {**renamed[0]["solution"], "answer": "nothing"}}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a.jsonl.zst").write_bytes(zstd(json_lines([*renamed, wrong])))
    own = "sources=[{name: mine, paths: [tasks], columns: {prompt: question}, on_error: skip}]"
    rl = published(tmp_path, prepare("stage2_rl", tmp_path, "tasks.families=[]", own))
    assert outcomes(rl, "mine") == {"read": 6, "kept": 6, "not read: not a valid task": 1}
