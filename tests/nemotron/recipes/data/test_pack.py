"""`nemotron data pack` as a user runs it: configs, resuming after kill -9, and that what it writes trains."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import nemotron.recipes
from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.config.script import load_script_config
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.chat import template_source
from nemotron.kit.chat_template import TEMPLATES
from nemotron.recipes.data.pack.example import example_conversations, write_example
from nemotron.stack.training.loaders import PackedLoader

RECIPE = Path(nemotron.recipes.__file__).parent / "data" / "pack"
_PLACES = ("RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ENV_FILE", "RAY_ADDRESS")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.dumps(record) for record in example_conversations(50, 0)]
    save_tokenizer(train_tokenizer(texts, 500), folder, model_max_length=4096)
    return folder


def start(cwd: Path, *overrides: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in _PLACES}
    environment["PYTHONPATH"] = str(Path(nemotron.recipes.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(RECIPE / "pack.py"), "--config", *overrides], cwd=cwd, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def pack(cwd: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(cwd, *overrides)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def published(cwd: Path, result: tuple[int, str, str]) -> Version:
    code, stdout, stderr = result
    assert code == 0, stderr
    return Registry(cwd / "output" / "artifacts").resolve(json.loads(stdout.splitlines()[-1])["data"])


def own(tokenizer: Path, *more: str) -> tuple[str, ...]:
    return ("own", f"tokenizer={tokenizer}", *more)


def test_a_users_folder_becomes_rows(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "chats" / "more").mkdir(parents=True)
    write_example(tmp_path / "chats" / "a.jsonl", 40, 1)
    write_example(tmp_path / "chats" / "more" / "b.jsonl", 20, 2)
    (tmp_path / "chats" / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "hm"}]}\n')
    version = published(
        tmp_path,
        pack(tmp_path, *own(tokenizer, f"sources=[{tmp_path}/chats]", "splits.valid=0.2", "packing.file_tokens=3000")),
    )
    fields, metrics = version.record["fields"], version.record["metrics"]
    outcomes = {row["outcome"]: row["conversations"] for row in metrics["curation"]}
    assert outcomes["read"] == 61 and outcomes["no assistant turn"] == 1
    assert "c.jsonl:1" in metrics["samples"][0]["where"]
    counts = {
        split: sum(
            len(row["seq_start_id"])
            for path in (version.path / split).iterdir()
            for row in pq.read_table(path).to_pylist()
        )
        for split in ("train", "valid")
    }
    assert counts["train"] == fields["num_examples"]
    assert sum(counts.values()) == outcomes["kept"] - metrics["duplicates"]
    loader = PackedLoader(version.path / "train", fields["seq_len"], seed=0)
    assert loader.trained_tokens == fields["num_loss_tokens"] and loader.num_rows == metrics["packs"]["train"]["rows"]
    assert (version.path / "tokenizer" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert len(list((version.path / "train").iterdir())) > 2
    # Twice the same bytes; weights and caps decide.
    again = pack(
        tmp_path,
        *own(
            tokenizer, f"sources=[{tmp_path}/chats]", "splits.valid=0.2", "packing.file_tokens=3000", "shard_bytes=4000"
        ),
    )
    assert published(tmp_path, again).digest == version.digest
    files = [("a", "a.jsonl", 1), ("b", "more", 3)]
    listed = [
        f"{{name: {name}, locations: [{tmp_path}/chats/{file}], weight: {weight}}}" for name, file, weight in files
    ]
    sources = f"[{', '.join(listed)}]"
    weighed = published(tmp_path, pack(tmp_path, *own(tokenizer, f"sources={sources}", "chat_template=super3")))
    carried = json.loads((weighed.path / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"]
    assert carried == template_source("super3")  # what the rows were made with, not what the tokenizer came with
    for share in weighed.record["metrics"]["mixture"]:
        assert share["realised"] == pytest.approx(share["requested"], abs=0.06)


def test_a_run_that_is_killed_goes_on_to_the_same_digest(tokenizer: Path, tmp_path: Path) -> None:
    words = own(
        tokenizer, "sources=[]", "example.num_conversations=800", "shard_bytes=40000", "packing.seq_length=1024",
        "packing.file_tokens=20000",
    )  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed = published(tmp_path / "a", pack(tmp_path / "a", *words))
    rng = random.Random(0)
    for phase in ("spool", "rows"):
        process = start(tmp_path / "b", *words)
        deadline = time.monotonic() + 60
        wanted = rng.randint(1, 6)
        while process.poll() is None and time.monotonic() < deadline:
            done = list((tmp_path / "b" / "output").glob(f"data/pack/*/work/{phase}/receipts/*.json"))
            if len(done) >= wanted:
                break
            time.sleep(0.005)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not list((tmp_path / "b" / "output" / "artifacts").glob("pack-data-own/[0-9]*"))
    resumed = published(tmp_path / "b", pack(tmp_path / "b", *words))
    assert resumed.digest == undisturbed.digest


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["chat_template=nanno3"], "nano3"),
        (["sources=[missing.jsonl]"], "no such file: missing.jsonl"),
        (["sources=[]"], "no conversations: give sources=[FOLDER, …]"),
        (["sources=[{name: a, locations: [.], low_effort: true}]"], "low_effort is for chat_template super3"),
        (["sources=[{name: a, locations: [.], weight: 1}, {name: b, locations: [.]}]"], "no weight for 'b'"),
        (["sources=[.]", "chat_template=nano2"], "has no token <SPECIAL_10>, which chat_template nano2 needs"),
        (["sources=[.]", "num_tokens=100"], "num_tokens goes with weights"),
    ],
)
def test_a_mistake_is_refused(overrides: list[str], said: str, tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 3, 1)
    code, _, stderr = pack(tmp_path, *own(tokenizer, *overrides))
    assert code == 2 and said in stderr and "Traceback" not in stderr
    assert len(stderr.strip().splitlines()) <= 3


def test_the_record_that_stops_a_run_is_named(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 3, 1)
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "asistant", "content": "x"}]}\n')
    code, _, stderr = pack(tmp_path, *own(tokenizer, "sources=[chats.jsonl]", "reading.on_error=stop"))
    assert code == 2 and "chats.jsonl:4: message 0: unknown role 'asistant', did you mean 'assistant'?" in stderr


def config(name: str, *overrides: str) -> Any:
    return load_script_config(RECIPE / "pack.py", ["--config", name, *overrides])


def test_a_link_that_leads_nowhere_costs_nothing_but_itself(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats" / "a.jsonl", 30, 1)
    (tmp_path / "chats" / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    code, _, stderr = pack(tmp_path, *own(tokenizer, "sources=[chats]"))
    assert code == 0 and "not read: 1 x link that leads nowhere" in stderr


def test_the_published_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path))
    nano3 = config("nano3_sft")
    assert (nano3.packing.seq_length, nano3.packing.algorithm) == (4096, "first_fit_shuffle")
    assert (nano3.splits.valid, nano3.splits.test) == (0.01, 0.01)
    assert (nano3.reasoning.off_share, nano3.reasoning.truncated_share) == (0.10, 0.03)
    collections = {source.locations[0].removeprefix("hf://").rpartition("/")[0] for source in nano3.sources}
    assert collections == {
        f"nvidia/Nemotron-{name}-v1"
        for name in (
            "Science",
            "Instruction-Following-Chat",
            "Math-Proofs",
            "SWE",
            "Agentic",
            "Competitive-Programming",
        )
    }
    assert all(source.used_in == ["nano_v3"] and source.weight is None for source in nano3.sources)
    super3 = config("super3_sft")
    assert super3.chat_template == "super3" and super3.reasoning.off_share == 0.03
    assert [source.locations for source in super3.sources] == [source.locations for source in nano3.sources]
    schema = sys.modules[type(nano3).__module__].PackConfig
    assert schema.model_fields["chat_template"].annotation.__args__ == TEMPLATES


def test_a_wrong_column_ends_the_run_although_records_may_be_skipped(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "a.jsonl", 40, 1)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace('"messages"', '"turns"'))
    code, _, stderr = pack(tmp_path, *own(tokenizer, "sources=[b.jsonl]", "reading.on_error=skip"))
    assert code == 2, stderr
    message, hint = stderr[stderr.index("error: ") :].splitlines()
    assert "source 'b': 40 of 40 records" in message and "turns" in message and "`columns`" in hint
    assert not list((tmp_path / "output" / "artifacts").glob("pack-data-own/[0-9]*"))
    renamed = "sources=[{locations: [b.jsonl], columns: {messages: turns}}]"
    published(tmp_path, pack(tmp_path, *own(tokenizer, renamed, "reading.on_error=skip")))
    for source, said in (
        ("{locations: [b.jsonl], columns: {mesages: turns}}", "unknown field `mesages`, did you mean `messages`?"),
        ("{paths: [b.jsonl]}", "here it is called sources.0.locations"),
        ("{locations: [b.jsonl], messages_field: turns}", "here it is called sources.0.columns: {messages: …}"),
    ):
        code, _, stderr = pack(tmp_path, *own(tokenizer, f"sources=[{source}]"))
        assert code == 2 and said in stderr, stderr


def test_the_table_of_what_was_kept_adds_up(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "a.jsonl", 60, 1)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "hm"}]}\n')
    words = own(tokenizer, "sources=[a.jsonl]", "packing.seq_length=256", "reading.on_error=skip")
    result = pack(tmp_path, *words)
    published(tmp_path, result)
    [line] = [line for line in result[2].splitlines() if line.startswith("a: ")]
    read, left_out, earlier, kept = map(int, re.findall(r"\d+", line))
    assert read == 61 and left_out > 1 and earlier > 0
    assert read - left_out + earlier == kept
