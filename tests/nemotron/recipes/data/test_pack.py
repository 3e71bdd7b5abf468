"""`nemotron data pack` as a user runs it: configs, resuming after kill -9, and that what it writes trains."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.config.script import load_script_config
from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import SFTPack
from nemotron.kit.chat_template import load_template
from nemotron.kit.megatron import megatron_pack
from nemotron.recipes.data.pack.example import example_conversations, write_example
from nemotron.stack.training.loaders import PackedLoader

from ..scripts import RECIPES, published, run

RECIPE = RECIPES / "data" / "pack"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [json.dumps(record) for record in example_conversations(50, 0)]
    save_tokenizer(train_tokenizer(texts, 500), folder, model_max_length=4096, template="nano3")
    return folder


def pack(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(cwd, RECIPE / "pack.py", *words)


def own(tokenizer: Path, *more: str) -> tuple[str, ...]:
    return ("own", f"tokenizer={tokenizer}", *more)


@pytest.mark.slow
def test_a_users_folder_becomes_rows(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "chats" / "more").mkdir(parents=True)
    write_example(tmp_path / "chats" / "a.jsonl", 40, 1)
    write_example(tmp_path / "chats" / "more" / "b.jsonl", 20, 2)
    latin1 = os.fsdecode(b"caf\xe9.jsonl")  # a name that is not UTF-8
    (tmp_path / "chats" / latin1).write_text('{"messages": [{"role": "user", "content": "hm"}]}\n')
    version = published(
        tmp_path,
        pack(tmp_path, *own(tokenizer, f"sources=[{tmp_path}/chats]", "splits.valid=0.2", "packing.file_tokens=3000")),
    )
    fields, metrics = version.record["fields"], version.record["metrics"]
    outcomes = {row["outcome"]: row["conversations"] for row in metrics["curation"]}
    assert outcomes["read"] == 61 and outcomes["no assistant turn"] == 1
    assert f"{latin1}:1" in metrics["samples"][0]["where"]
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
    listed = [f"{{name: {name}, paths: [{tmp_path}/chats/{file}], weight: {weight}}}" for name, file, weight in files]
    sources = f"[{', '.join(listed)}]"
    weighed = published(tmp_path, pack(tmp_path, *own(tokenizer, f"sources={sources}", "chat_template=super3")))
    carried = json.loads((weighed.path / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"]
    assert carried == load_template("super3").source  # what the rows were made with, not what the tokenizer came with
    for share in weighed.record["metrics"]["mixture"]:
        assert share["realised"] == pytest.approx(share["requested"], abs=0.06)


def test_sequences_are_filled_up_to_a_multiple(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 40, 1)
    words = own(tokenizer, "sources=[chats.jsonl]", "packing.seq_length=1024", "packing.too_long=cut")
    plain, filled = (
        published(tmp_path, pack(tmp_path, *words, *more)) for more in ((), ("packing.pad_seq_to_mult=24",))
    )
    sequences: list[dict[tuple[int, ...], list[int]]] = []
    for version in (plain, filled):
        found: dict[tuple[int, ...], list[int]] = {}
        for row in pq.read_table(version.path / "train").to_pylist():
            ends = [*row["seq_start_id"][1:], len(row["input_ids"])]
            for begin, end in zip(row["seq_start_id"], ends, strict=True):
                found[tuple(row["input_ids"][begin:end])] = row["loss_mask"][begin:end]
        sequences.append(found)
    end_of_text = 2  # of the recipes' tokenizer
    for ids, mask in sequences[1].items():
        assert len(ids) % 24 == 1 and len(ids) <= 1024
        length = max((n for n in range(len(ids) + 1) if ids[:n] in sequences[0]), default=0)
        assert ids[length:] == (end_of_text,) * (len(ids) - length) and len(ids) - length < 24
        assert mask == sequences[0][ids[:length]] + [0] * (len(ids) - length)
    assert len(sequences[0]) == len(sequences[1])


def test_rows_that_megatron_bridge_would_misread_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 40, 1)
    words = own(tokenizer, "sources=[chats.jsonl]", "splits.valid=0.2", "packing.seq_length=1024")
    rows = SFTPack.load(path=published(tmp_path, pack(tmp_path, *words)).path)
    with pytest.raises(UserError, match="not padded to multiples of lcm") as caught:
        megatron_pack(rows, 1024, 64, 1)
    assert "packing.pad_seq_to_mult=64" in str(caught.value.hint)
    with pytest.raises(UserError, match=r"has \d+ training rows, and a global batch takes 4096"):
        megatron_pack(rows, 1024, 1, 4096)
    with pytest.raises(UserError, match="have up to 1024 tokens"):
        megatron_pack(rows, 2048, 1, 1)
    assert rows.train_path is not None
    table = pq.read_table(min(rows.train_path.iterdir()))
    weights = table.column("loss_mask").cast(pa.list_(pa.float32()))
    (tmp_path / "weighed").mkdir()
    pq.write_table(table.set_column(1, "loss_mask", weights), tmp_path / "weighed/00000.parquet")
    with pytest.raises(UserError, match="makes whole numbers"):
        megatron_pack(rows.model_copy(update={"train_path": tmp_path / "weighed"}), 1024, 1, 1)


def test_what_was_killed_behind_its_publishing_is_not_published_again(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 20, 1)
    words = own(tokenizer, f"sources=[{tmp_path}/chats.jsonl]")
    version = published(tmp_path, pack(tmp_path, *words))
    (state,) = (tmp_path / "output").rglob("run.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "running"}))
    assert published(tmp_path, pack(tmp_path, *words)).ref == version.ref


def test_a_template_of_your_own_travels_with_the_rows(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 40, 1)
    (tmp_path / "own.jinja").write_text(load_template("nano3").source, encoding="utf-8")
    words = own(tokenizer, "sources=[chats.jsonl]")
    named, own_one, tokenizers = (
        published(tmp_path, pack(tmp_path, *words, f"chat_template={name}"))
        for name in ("nano3", "own.jinja", "tokenizer")
    )
    assert named.record["fields"]["chat_template"] == "nano3"
    copy = own_one.path / "chat_template"
    assert own_one.record["fields"]["chat_template"] == str(copy)
    assert load_template(str(copy)).source == load_template("nano3").source
    loss_tokens = {version.record["fields"]["num_loss_tokens"] for version in (named, own_one, tokenizers)}
    assert len(loss_tokens) == 1  # the tokenizer came with that of nano3
    assert [version.record["fields"]["reasoning"] for version in (named, own_one, tokenizers)] == [True] * 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["chat_template=nanno3"], "did you mean 'nano3'?"),
        (["sources=[.]", "chat_template=own.jinja"], "chat_template: no such file: "),
        (["sources=[missing.jsonl]"], "no such file: missing.jsonl"),
        (["sources=[]"], "no conversations: give sources=[FOLDER, …]"),
        (["sources=[{name: a, paths: [.], low_effort: true}]"], "low_effort is for chat_template super3"),
        (["sources=[{name: a, paths: [.], weight: 1}, {name: b, paths: [.]}]"], "no weight for 'b'"),
        (["sources=[{name: a, paths: [.], weight: 1, valid_fraction: 1}]"], "'a' is held out and has weight 1"),
        (["sources=[.]", "chat_template=nano2"], "has no token <SPECIAL_10>, which chat_template nano2 needs"),
        (["sources=[.]", "num_tokens=100"], "num_tokens goes with weights"),
        (["sources=[chats.jsonl]", "chat_template=tokenizer", "tokenizer=bare"], "comes without a chat template"),
        (["sources=[{paths: [.], train_on: first}]"], "must be one of 'all', 'last'"),
    ],
)
def test_a_mistake_is_refused(overrides: list[str], said: str, tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "chats.jsonl", 3, 1)
    (tmp_path / "bare").mkdir()
    shutil.copyfile(tokenizer / "tokenizer.json", tmp_path / "bare" / "tokenizer.json")
    result = pack(tmp_path, *own(tokenizer, *overrides))
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3


def config(name: str, *overrides: str) -> Any:
    return load_script_config(RECIPE / "pack.py", ["--config", name, *overrides])


def test_the_published_configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path))
    nano3 = config("nano3_sft")
    assert (nano3.packing.seq_length, nano3.packing.algorithm) == (4096, "first_fit_shuffle")
    assert (nano3.splits.valid, nano3.splits.test) == (0.01, 0.01)
    assert (nano3.reasoning.off_share, nano3.reasoning.truncated_share) == (0.10, 0.03)
    collections = {source.paths[0].removeprefix("hf://").rpartition("/")[0] for source in nano3.sources}
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
    assert [source.paths for source in super3.sources] == [source.paths for source in nano3.sources]


def test_broken_files_end_the_run_by_their_bytes_however_few_records_they_count_as(
    tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    write_example(tmp_path / "mine" / "a.jsonl", 20, 1)
    size = (tmp_path / "mine" / "a.jsonl").stat().st_size
    (tmp_path / "mine" / "b.jsonl.gz").write_bytes(b"\x1f\x8b" + bytes(size))
    result = pack(tmp_path, *own(tokenizer, "sources=[mine]", "reading.on_error=skip"))
    assert result.returncode == 2, result.stderr
    assert "source 'mine': 1 of 21 records cannot be read, with 50.0% of its bytes, more than" in result.stderr


def test_a_source_without_a_record_ends_the_run(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "a.jsonl", 20, 1)
    (tmp_path / "none.jsonl.gz").write_bytes(gzip.compress(b""))
    result = pack(tmp_path, *own(tokenizer, "sources=[a.jsonl, none.jsonl.gz]", "reading.on_error=skip"))
    assert result.returncode == 2, result.stderr
    assert "source 'none' is empty: no record in " in result.stderr and "none.jsonl.gz\n" in result.stderr
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "empty.jsonl").touch()
    (tmp_path / "a.jsonl").rename(tmp_path / "both" / "a.jsonl")
    result = pack(tmp_path, *own(tokenizer, "sources=[both]"))  # a file with nothing in it is no record
    assert result.returncode == 0 and "both: 20 records read - 0 left out" in result.stderr, result.stderr


def test_a_wrong_column_ends_the_run_although_records_may_be_skipped(tokenizer: Path, tmp_path: Path) -> None:
    write_example(tmp_path / "a.jsonl", 40, 1)
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace('"messages"', '"turns"'))
    result = pack(tmp_path, *own(tokenizer, "sources=[b.jsonl]", "reading.on_error=skip"))
    assert result.returncode == 2, result.stderr
    [message] = result.stderr[result.stderr.index("error: ") :].splitlines()
    assert "source 'b': 40 of 40 records" in message and "say so in the source: columns: {messages: turns}" in message
    assert not list((tmp_path / "output" / "artifacts").glob("pack-data-own/[0-9]*"))
    renamed = "sources=[{paths: [b.jsonl], columns: {messages: turns}}]"
    published(tmp_path, pack(tmp_path, *own(tokenizer, renamed, "reading.on_error=skip")))
    for source, said in (
        ("{paths: [b.jsonl], columns: {mesages: turns}}", "unknown field `mesages`, did you mean `messages`?"),
        ("{locations: [b.jsonl]}", "here it is called sources.0.paths"),
        ("{paths: [b.jsonl], messages_field: turns}", "here it is called sources.0.columns: {messages: …}"),
    ):
        result = pack(tmp_path, *own(tokenizer, f"sources=[{source}]"))
        assert result.returncode == 2 and said in result.stderr
