"""Conversations to packed rows: equal, row by row, to an independent slow way; the same bytes whoever does the work."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat import loss_weights
from nemotron.data_prep.chat import pack as chat_pack
from nemotron.data_prep.chat import spool as chat_spool
from nemotron.data_prep.chat.conversations import Conversation, training_spans
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.data_prep.chat.spool import ChatSettings, ChatSource
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reading import Reading
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine
from nemotron.data_prep.work.shards import freeze
from nemotron.kit.chat_records import to_messages
from nemotron.kit.chat_template import load_template
from nemotron.kit.chat_templates import TEMPLATES
from nemotron.stack.training.loaders import PackedLoader
from nemotron.stack.training.losses import selected_loss_sum

FIELDS = {field: field for field in ("messages", "tools", "used_in")}
READING = Reading(columns=FIELDS, required=(), present=("messages",))
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_tokenizer(["user assistant system two plus two is four <tool_call> add value " * 40], 400)
    made.add_special_tokens(["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"])
    return made


def records(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of all kinds: with and without system, tools, reasoning; one to three turns of the user."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": f"Be brief {number}." + rng.choice(["", " /no_think"])})
        with_tools = rng.random() < 0.5
        for turn in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": f"What is {number} plus {turn}, é?\n\nSay <it>."})
            for _ in range(rng.randint(0, 2) if with_tools else 0):
                call = {"name": "add", "arguments": {"a": str(number), "b": [1, "ü"]}}
                step = {
                    "role": "assistant",
                    "content": rng.choice(["", "Wait."]),
                    "tool_calls": [call] * rng.randint(1, 2),
                }
                messages.append(step | ({"reasoning_content": "A tool\nhelps."} if rng.random() < 0.6 else {}))
                messages += [{"role": "tool", "content": "7"}] * len(step["tool_calls"])
            answer = {"role": "assistant", "content": f"It is {number + turn}."}
            messages.append(answer | ({"reasoning_content": f"{number} and {turn}"} if rng.random() < 0.6 else {}))
        made.append({"messages": messages, "tools": [ADD] if with_tools else None, "used_in": ["nano_v3"]})
    return made


# --- The slow way: Jinja, offsets, regular expressions --------------------------------------------------------------


def slow_sequences(
    record: dict[str, Any], template: str, tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, label-aligned mask) of every sequence that a record becomes: the whole text encoded at once, trained spans
    found in it by the tokens that control turns."""
    messages, jinja = record["messages"], compiled(template)
    for begin, end in pairwise([0, *slow_ends(messages, template)]):
        part = messages[:end]
        text = jinja.render(messages=part, tools=record["tools"])
        spans = []
        if template == "nano2":
            at = text.rindex("<SPECIAL_11>Assistant\n")
            found = re.compile(r"<SPECIAL_11>Assistant\n(?:<think>\n|<think></think>)(.*?<SPECIAL_12>)", re.S).match(
                text, at
            )
            spans = [found.span(1)] if found else []
        else:
            turns = list(
                re.finditer(r"<\|im_start\|>assistant\n(<think>\n|<think></think>)(.*?<\|im_end\|>)", text, re.S)
            )
            answers = [i for i, message in enumerate(part) if message["role"] == "assistant"]
            for turn, i in zip(turns, answers, strict=True):
                lost = part[i].get("reasoning_content") and turn[1] == "<think></think>"
                spans += [] if lost or i < begin else [turn.span(2)]
        encoding = tokenizer.encode(text, add_special_tokens=False)
        trained = [any(begin <= start < stop for begin, stop in spans) for start, _ in encoding.offsets]
        yield encoding.ids, [*map(int, trained[1:]), 0]


@cache
def compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    unmarked = re.sub(r"{%- (end)?generation -%}", "", load_template(template).source)
    return environment.from_string(unmarked)


def slow_ends(messages: list[dict[str, Any]], template: str) -> list[int]:
    """Where the sequences of a conversation end."""
    if template == "nano2":
        return [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    earlier = [
        after
        for user, after in pairwise(users)
        if any("reasoning_content" in message for message in messages[user:after])
    ]
    return [*earlier, len(messages)]


# --- The whole way ----------------------------------------------------------------------------------------------------


def settings_of(tokenizer: Tokenizer, template: str = "nano3", **more: Any) -> ChatSettings:
    source = more.pop("source", ChatSource("own", READING, valid_fraction=0.1, test_fraction=0.05))
    values: dict[str, Any] = {"seq_len": 2048, "too_long": "drop", "reasoning_off": 0.0, "reasoning_truncated": 0.0}
    return ChatSettings(
        tokenizer=tokenizer.to_str(), template=template, seed=5, sources={source.name: source}, **(values | more)
    )


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(
    folder: Path,
    paths: list[Path],
    how: ChatSettings,
    engine: Engine | None = None,
    shard_bytes: int = 30_000,
    conversation_tokens: bool = False,
) -> tuple[Path, Counter[str], chat_pack.Chosen]:
    """(folder of rows, outcomes, what was chosen)."""
    engine = engine or SerialEngine()
    files = {name: list_files([str(path) for path in paths]) for name in how.sources}
    plan = chat_spool.plan_tokenize(how, files, shard_bytes)
    freeze(plan, folder / "spool")
    spool = chat_spool.tokenize_conversations(plan, folder / "spool", how, engine)
    outcomes: Counter[str] = Counter()
    for of_source in spool.table.counts.values():
        outcomes.update(of_source)
    names = list(how.sources)
    sequences = chat_pack.read_sequences(folder / "spool", plan, names)
    chosen = chat_pack.choose(sequences, names, weights=None, repeats={}, num_tokens=None)
    packing = chat_pack.Packing(how.seq_len, "best_fit_decreasing", 0, 20_000, conversation_tokens)
    chat_pack.pack_rows(plan, sequences, chosen.splits, packing, folder, engine)
    return folder / "rows", outcomes, chosen


def test_a_record_may_say_its_split_and_none_that_overlaps_evaluation_is_kept(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    questions = ["Who mends the nets at night?", "How many apples are there in the blue basket?", "What is left then?"]
    answer = {"role": "assistant", "content": "Nobody knows."}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": question}, answer], "split": split}
        for question, split in zip(questions, ("train", "train", "valid"), strict=True)
    ]
    reading = Reading(columns={"messages": "messages", "split": "split"}, required=())
    for guarded, kept in ((False, 2), (True, 1)):
        source = ChatSource("own", reading, valid_fraction=1.0, split_column="split", guarded=guarded)
        how = settings_of(tokenizer, source=source, protected=("how many apples are there, in the blue basket",))
        _, outcomes, chosen = run(tmp_path / str(guarded), [write(tmp_path / "a.jsonl", rows)], how)
        assert {split: len(numbers) for split, numbers in chosen.splits.items()} == {
            "train": kept, "valid": 1, "test": 0
        }  # fmt: skip
        assert outcomes[chat_spool.OVERLAPS] == 2 - kept


def test_no_beginning_of_what_is_held_out_is_trained_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Of each conversation also records of its first turn, one of them with another answer."""
    rows = []
    for number in range(60):
        first = {"role": "user", "content": f"What is {number} plus 1?"}
        answers = [{"role": "assistant", "content": text} for text in (f"It is {number + 1}.", f"{number + 1}")]
        more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        rows += [{"messages": [first, answer]} for answer in answers] + [{"messages": [first, answers[0], *more]}]
    folder, _, _ = run(tmp_path, [write(tmp_path / "own.jsonl", rows)], settings_of(tokenizer))
    questions = [
        {re.findall(r"What is (\d+) plus 1", tokenizer.decode(list(ids)))[0] for ids, _ in sequences_in(folder / split)}
        for split in ("train", "valid", "test")
    ]
    assert all(questions) and sum(map(len, questions)) == 60


def sequences_in(folder: Path, seq_len: int = 2048) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every sequence of the rows below a folder, by their `seq_start_id`."""
    found = []
    for path in sorted(folder.rglob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            assert len(row["input_ids"]) == len(row["loss_mask"]) <= seq_len
            bounds = [*row["seq_start_id"], len(row["input_ids"])]
            assert bounds[0] == 0 and bounds == sorted(set(bounds))
            found += [
                (tuple(row["input_ids"][begin:end]), tuple(row["loss_mask"][begin:end]))
                for begin, end in pairwise(bounds)
            ]
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_rows_are_those_of_the_slow_way(template: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = records(70, seed=1)
    folder, outcomes, chosen = run(tmp_path, [write(tmp_path / "own.jsonl", made)], settings_of(tokenizer, template))
    slow = [(tuple(ids), tuple(mask)) for record in made for ids, mask in slow_sequences(record, template, tokenizer)]
    trainable = {sequence for sequence in slow if any(sequence[1])}
    ours = sequences_in(folder)
    assert Counter(ours) == Counter(trainable)
    assert outcomes["read"] == 70 and outcomes["kept"] == len(ours) + chosen.duplicates
    assert {path.name for path in folder.iterdir()} >= {"train", "valid", "test"}
    schema = pq.read_schema(next(folder.rglob("*.parquet")))
    assert [str(field.type) for field in schema] == [
        "list<element: int32>",
        "list<element: uint8>",
        "list<element: int32>",
    ]


def digest(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.parquet"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_same_bytes_by_one_process_and_by_two(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", records(100, seed=2))
    how = settings_of(tokenizer)
    one, _, _ = run(tmp_path / "one", [path], how)
    with PoolEngine(2) as engine:
        two, _, _ = run(tmp_path / "two", [path], how, engine)
    assert digest(one) == digest(two) and len(digest(one)) > 4
    again, _, _ = run(tmp_path / "one", [path], how)  # all receipts are there
    assert digest(again) == digest(two)
    other, _, _ = run(tmp_path / "other", [path], replace(how, seed=6))
    assert digest(other) != digest(one)


def test_shards_of_any_size_hold_the_same_sequences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = records(80, seed=3)
    jsonl = write(tmp_path / "own.jsonl", made)
    whole = sequences_in(run(tmp_path / "a", [jsonl], settings_of(tokenizer), shard_bytes=10**9)[0])
    small = sequences_in(run(tmp_path / "b", [jsonl], settings_of(tokenizer), shard_bytes=3_000)[0])
    assert sorted(whole) == sorted(small)
    # The same records as Parquet, with tools as JSON text, as some data sets have them.
    table = pa.table(
        {
            "messages": [json.dumps(record["messages"]) for record in made],
            "tools": [json.dumps(record["tools"]) for record in made],
        }
    )
    pq.write_table(table, tmp_path / "own.parquet", row_group_size=7)
    parquet = sequences_in(run(tmp_path / "c", [tmp_path / "own.parquet"], settings_of(tokenizer))[0])
    assert sorted(parquet) == sorted(whole)


def test_what_is_too_long_is_dropped_or_cut_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", records(60, seed=4))
    everything = sequences_in(run(tmp_path / "a", [path], settings_of(tokenizer))[0])
    long = sum(len(ids) > 200 for ids, _ in everything)
    assert 0 < long < len(everything)
    folder, outcomes, chosen = run(tmp_path / "b", [path], settings_of(tokenizer, seq_len=200))
    assert outcomes["longer than seq_length"] == long and chosen.duplicates == 0
    assert sorted(sequences_in(folder, 200)) == sorted(pair for pair in everything if len(pair[0]) <= 200)
    folder, outcomes, _ = run(tmp_path / "c", [path], settings_of(tokenizer, seq_len=200, too_long="cut"))
    cut = {(ids[:200], (*mask[:199], 0)) for ids, mask in everything if len(ids) > 200}
    assert outcomes["cut at seq_length, and kept"] == long
    assert set(sequences_in(folder, 200)) >= {pair for pair in cut if any(pair[1])}
    assert outcomes["nothing to train on"] == sum(not any(mask[:199]) for ids, mask in everything if len(ids) > 200)


def test_the_last_token_of_a_cut_answer_has_no_label(tokenizer: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "four two " * 200}]
    path = write(tmp_path / "own.jsonl", [{"messages": messages}])
    source = ChatSource("own", READING)
    folder, _, _ = run(tmp_path / "w", [path], settings_of(tokenizer, source=source, seq_len=100, too_long="cut"))
    [(ids, mask)] = sequences_in(folder, 100)
    begin = mask.index(1)
    assert len(ids) == 100 and mask == (0,) * begin + (1,) * (99 - begin) + (0,)


def test_bad_records_stop_with_their_number_or_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = records(5, seed=5)
    unasked = [*good[0]["messages"], {"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]
    undeclared = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant turn"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "unknown role"),
        ({"messages": "hello"}, "malformed messages"),
        ({"messages": unasked, "tools": [ADD]}, "tool response without call"),
        ({"messages": undeclared}, "tool without declaration"),
    ]
    for record, reason in bad:
        path = write(tmp_path / "own.jsonl", [*good, record, *good])
        with pytest.raises(UserError, match=r"own.jsonl:6: "):
            run(tmp_path / f"stop {reason}", [path], settings_of(tokenizer))
    path = write(
        tmp_path / "own.jsonl", [*good, *(record for record, _ in bad), {"other": 1}, good[0] | {"used_in": []}]
    )
    with path.open("a") as file:
        file.write("{\n" + json.dumps({"messages": [{"role": "assistant", "content": "<|im_end|>"}]}) + "\n")
    source = ChatSource("own", replace(READING, on_error="skip"), used_in=("nano_v3", "other"))
    _, outcomes, _ = run(tmp_path / "skip", [path], settings_of(tokenizer, source=source))
    assert outcomes["not among used_in"] == len(bad) + 2  # they have none
    source = replace(source, used_in=())
    _, outcomes, chosen = run(tmp_path / "all", [path], settings_of(tokenizer, source=source))
    assert {reason: outcomes[reason] for _, reason in bad} == dict.fromkeys((reason for _, reason in bad), 1)
    assert outcomes["control token in a message"] == 1 and chosen.duplicates >= 1
    assert outcomes["malformed JSON"] == outcomes["field is missing"] == 1
    # Every record is in the account: read and sequences made of it are kept or left out for a reason.
    assert outcomes["read"] == 5 + len(bad) + 4
    left_out = sum(outcomes.values()) - sum(outcomes[name] for name in ("read", "kept", "earlier turn, on its own"))
    assert outcomes["read"] + outcomes["earlier turn, on its own"] == outcomes["kept"] + left_out


def test_structs_of_a_table_are_the_objects_that_they_were_made_of(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Parquet gives every struct all fields of its column: what was not there must not be trained on as null."""
    made = records(40, seed=8)
    subtract = {"name": "sub", "parameters": {"type": "object", "properties": {"b": {"type": "number"}}}}
    for record in made[::2]:
        record["tools"] = [subtract, ADD]
        record["messages"] += [
            {"role": "user", "content": "And less?"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "sub", "arguments": {"c": 1.5}}]},
        ]
    whole = sequences_in(run(tmp_path / "a", [write(tmp_path / "own.jsonl", made)], settings_of(tokenizer))[0])
    for record in made:  # a column has one type
        for call in (call for message in record["messages"] for call in message.get("tool_calls", [])):
            if "b" in call["arguments"]:
                call["arguments"]["b"] = json.dumps(call["arguments"]["b"])
    text = sequences_in(run(tmp_path / "t", [write(tmp_path / "text.jsonl", made)], settings_of(tokenizer))[0])
    assert len(text) == len(whole)
    pq.write_table(pa.Table.from_pylist(made), tmp_path / "own.parquet", row_group_size=7)
    parquet = sequences_in(run(tmp_path / "b", [tmp_path / "own.parquet"], settings_of(tokenizer))[0])
    assert sorted(parquet) == sorted(text)


@pytest.mark.usefixtures("few_open_files")
def test_many_shards_with_few_files_open(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", records(150, seed=9))
    expected = sequences_in(run(tmp_path / "a", [path], settings_of(tokenizer))[0])
    folder, _, _ = run(tmp_path / "b", [path], settings_of(tokenizer), shard_bytes=2_000)
    assert len(list((tmp_path / "b" / "spool").glob("*.ids"))) > 40
    assert sorted(sequences_in(folder)) == sorted(expected)


def test_a_cap_takes_its_share_of_every_piece(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", records(100, seed=6))
    source = ChatSource("own", READING, max_records=17)
    _, outcomes, _ = run(tmp_path / "w", [path], settings_of(tokenizer, source=source), shard_bytes=5_000)
    assert outcomes["read"] == 17


def made_up(lengths: list[int], sources: list[int], orders: list[int] | None = None) -> chat_pack.Sequences:
    sequences = np.zeros(len(lengths), chat_pack.SEQUENCE)
    sequences["order"] = orders or [hash((i, "x")) % 2**63 for i in range(len(lengths))]
    sequences["length"], sequences["source"] = lengths, sources
    return sequences


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2)), min_size=30, max_size=200),
    st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
)
def test_the_mixture_is_what_the_weights_say(drawn: list[tuple[int, int]], weights: list[float]) -> None:
    names = ["a", "b", "c"]
    sequences = made_up([length for length, _ in drawn] + [5, 5, 5], [source for _, source in drawn] + [0, 1, 2])
    wanted = dict(zip(names, weights, strict=True))
    chosen = chat_pack.choose(sequences, names, weights=wanted, repeats={}, num_tokens=None)
    train = chosen.splits["train"]
    assert len(set(train.tolist())) == len(train)  # nothing twice
    there = np.bincount(sequences["source"], sequences["length"], minlength=3)
    got = np.bincount(sequences["source"][train], sequences["length"][train], minlength=3)
    total = min(there / (np.array(weights) / sum(weights)))
    for number, share in enumerate(chosen.shares):
        assert abs(got[number] - total * weights[number] / sum(weights)) <= 300  # less than one sequence off
        assert share.tokens == got[number] and share.requested == pytest.approx(
            weights[number] / sum(weights), abs=1e-5
        )
    # Asked for more than there is: repeated, unless that is not allowed.
    asked = int(there.sum()) * 3
    chosen = chat_pack.choose(sequences, names, weights=wanted, repeats={}, num_tokens=asked)
    for share in chosen.shares:
        assert abs(share.tokens - asked * wanted[share.source] / sum(weights)) <= 300
    with pytest.raises(UserError, match="epochs of them"):
        chat_pack.choose(sequences, names, weights=wanted, repeats=dict.fromkeys(names, 0.5), num_tokens=asked)


def test_repeats_without_weights_and_equal_sequences() -> None:
    sequences = made_up([10, 10, 10, 10], [0, 0, 1, 1], [3, 1, 3, 2])  # the third equals the first
    chosen = chat_pack.choose(sequences, ["a", "b"], weights=None, repeats={"a": 2.5}, num_tokens=None)
    assert chosen.duplicates == 1
    assert Counter(chosen.splits["train"].tolist()) == {0: 2, 1: 3, 3: 1}
    assert [(share.epochs, share.tokens) for share in chosen.shares] == [(2.5, 50), (1.0, 10)]
    held = sequences.copy()
    held["split"] = [0, 0, 1, 0]
    chosen = chat_pack.choose(held, ["a", "b"], weights=None, repeats={}, num_tokens=None)
    assert sorted(chosen.splits["train"].tolist()) == [1, 3] and chosen.splits["valid"].tolist() == [2]
    with pytest.raises(UserError, match="source 'c' has weight 1 and no sequence"):
        chat_pack.choose(sequences, ["a", "b", "c"], weights={"a": 1, "b": 1, "c": 1}, repeats={}, num_tokens=None)


def test_low_effort_is_in_the_text_of_its_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", records(10, seed=8))
    source = ChatSource("own", READING, low_effort=True)
    folder, _, _ = run(tmp_path / "w", [path], settings_of(tokenizer, "super3", source=source))
    texts = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids, _ in sequences_in(folder)]
    assert texts and all(text.count("{reasoning effort: low}") == 1 for text in texts)


# --- Weights and turns ------------------------------------------------------------------------------------------------


def asked(number: int, **more: Any) -> dict[str, Any]:
    """A ShareGPT record of two questions and answers."""
    turns = [("human", f"What is {number}?"), ("gpt", f"It is {number}."), ("human", "And then?"), ("gpt", "No more.")]
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def trained_text(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """What is trained of each sequence."""
    return sorted(
        tokenizer.decode([i for i, weight in zip(ids[1:], mask, strict=False) if weight], skip_special_tokens=False)
        for ids, mask in sequences_in(folder)
    )


def test_the_last_turn_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [asked(3), asked(4)])
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    folder, _, _ = run(tmp_path / "all", [path], settings_of(tokenizer, source=source))
    assert trained_text(folder, tokenizer) == [f"It is {n}.<|im_end|>No more.<|im_end|>" for n in (3, 4)]
    folder, _, _ = run(tmp_path / "last", [path], settings_of(tokenizer, source=replace(source, train_on="last")))
    assert trained_text(folder, tokenizer) == ["No more.<|im_end|>"] * 2
    # Reasoning of an earlier turn gives that turn a sequence of its own, which is not wanted here.
    thinks = asked(5)
    thinks["conversations"][1]["value"] = "<think>so</think>It is 5."
    path = write(tmp_path / "thinks.jsonl", [thinks])
    for template in TEMPLATES:
        how = settings_of(tokenizer, template, source=replace(source, train_on="last"))
        folder, outcomes, _ = run(tmp_path / template, [path], how)
        assert outcomes["kept"] == 1 and "It is 5" not in trained_text(folder, tokenizer)[0]


def bigram_loss(folder: Path, vocab_size: int) -> float:
    """The SFT loss over all rows below a folder, as training computes it, of a model that sees one token."""
    table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nats, weights = 0.0, 0.0
    for batch in PackedLoader(folder, 2048, seed=0).all_batches(4):
        answers = batch.loss_mask_BL.bool()
        of_tokens = batch.loss_mask_BL[answers]
        nats += selected_loss_sum(table[batch.input_ids_BL[answers]], batch.labels_BL[answers], of_tokens).item()
        weights += of_tokens.sum().item()
    return nats / weights


def test_a_record_of_weight_two_counts_as_two(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """By weights: the sum of weighted losses over the sum of weights. Against it: the record twice, by `repeats`."""
    easy, hard = [asked(n, level="easy") for n in range(6)], [asked(n, level="hard", w=1) for n in range(60, 64)]
    source = ChatSource("own", chat_spool.chat_reading({"category": "level"}, "stop"), loss_weights={"hard": 2.0})
    path = write(tmp_path / "own.jsonl", [*easy, *hard])
    by_category, _, _ = run(tmp_path / "category", [path], settings_of(tokenizer, source=source))
    assert {weight for _, mask in sequences_in(by_category) for weight in mask} == {0.0, 1.0, 2.0}
    [schema] = {pq.read_schema(file) for file in (by_category / "train").iterdir()}
    assert str(schema.field("loss_mask").type) == "list<element: float>"
    by_record = replace(source, reading=chat_spool.chat_reading({"loss_weight": "w"}, "stop"), loss_weights={})
    path = write(tmp_path / "weights.jsonl", [*easy, *(record | {"w": 2} for record in hard)])
    weighed, _, _ = run(tmp_path / "record", [path], settings_of(tokenizer, source=by_record))
    assert sorted(sequences_in(weighed)) == sorted(sequences_in(by_category))
    # The hard ones twice, which duplicates in a file are not: equal sequences are left out. So as rows of two folders.
    one, two = (write(tmp_path / f"{name}.jsonl", rows) for name, rows in (("all", easy + hard), ("hard", hard)))
    plain = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    folders = [
        run(tmp_path / f"plain {number}", [file], settings_of(tokenizer, source=plain))[0]
        for number, file in enumerate((one, two))
    ]
    twice = tmp_path / "twice"
    twice.mkdir()
    for number, folder in enumerate(folders):
        for file in (folder / "train").iterdir():
            (twice / f"{number}-{file.name}").write_bytes(file.read_bytes())
    vocab_size = tokenizer.get_vocab_size()
    assert bigram_loss(by_category / "train", vocab_size) == pytest.approx(bigram_loss(twice, vocab_size), rel=1e-7)
    assert bigram_loss(by_category / "train", vocab_size) != pytest.approx(
        bigram_loss(folders[0] / "train", vocab_size), rel=1e-4
    )


def test_what_the_records_of_each_category_count_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    weights = {"hard": 2.0, "spam": 0.0}
    source = ChatSource("own", chat_spool.chat_reading({"category": "level"}, "stop"), loss_weights=weights)
    levels = ["easy", "easy", "easy", "hard", "hard", "HARD", "spam", None, *map(str, range(9))]
    path = write(tmp_path / "own.jsonl", [asked(n, level=level) for n, level in enumerate(levels)])
    how = settings_of(tokenizer, source=source)
    [note] = spooled(tmp_path / "a", path, how).notes(how)
    counts = "hard 2 (2), spam 0 (1), easy 1 (3), 0 1 (1), 1 1 (1), 2 1 (1), 3 1 (1), 4 1 (1) and 6 more"
    assert note == f"own: loss weight by category: {counts}"


def test_weights_that_mean_nothing_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ChatSource("own", chat_spool.chat_reading({"category": "level"}, "stop"), loss_weights={"hrad": 2.0})
    path = write(tmp_path / "own.jsonl", [asked(1, level="hard"), asked(2)])
    with pytest.raises(UserError, match="names 'hrad', which is the category of no record") as raised:
        run(tmp_path / "a", [path], settings_of(tokenizer, source=source))
    assert raised.value.hint == "categories there: hard (1), none (1)"
    for columns, asked_for in (({"category": "levle"}, "levle"), ({}, "category")):
        other = replace(source, reading=chat_spool.chat_reading(columns, "stop"))
        with pytest.raises(UserError, match="names 'hrad'") as raised:
            run(tmp_path / asked_for, [path], settings_of(tokenizer, source=other))
        what = "name the one that says it: columns: {category: FIELD}"
        assert raised.value.hint == f"no record has a field '{asked_for}'; {what}"
    for weight in ("2", -1, True, float("inf")):
        path = write(tmp_path / "own.jsonl", [asked(1), asked(2, loss_weight=weight)])
        with pytest.raises(UserError, match=r"own.jsonl:2: loss_weight must be a number from 0 on"):
            run(tmp_path / f"b{weight}", [path], settings_of(tokenizer, source=replace(source, loss_weights={})))
    path = write(tmp_path / "own.jsonl", [asked(1), asked(2, loss_weight=0)])
    _, outcomes, _ = run(tmp_path / "c", [path], settings_of(tokenizer, source=replace(source, loss_weights={})))
    assert outcomes["kept"] == outcomes["loss weight 0"] == 1


def test_a_category_of_no_record_is_said_before_the_work(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenised: list[list[Conversation]] = []

    def encode(batch: list[Conversation], *how: Any) -> Any:
        tokenised.append(batch)
        return encode_conversations(batch, *how)

    monkeypatch.setattr(chat_spool, "encode_conversations", encode)
    rows = [asked(n, level="easy" if n < 900 else "hard") for n in range(1000)]
    path = write(tmp_path / "own.jsonl", [*rows, {"question": "no category"}])
    source = ChatSource("own", chat_spool.chat_reading({"category": "level"}, "skip"), loss_weights={"hrad": 2.0})
    with pytest.raises(UserError, match="names 'hrad', which is the category of no record") as raised:
        spooled(tmp_path / "a", path, settings_of(tokenizer, source=source))
    assert raised.value.hint == "categories there: easy (900), hard (100), none (1)"
    assert not tokenised
    # Of a source that is too long to be read for this alone, only a part is looked at: the end of the work says it.
    monkeypatch.setattr(loss_weights, "_LOOKED_AT", 1000)
    with pytest.raises(UserError, match="names 'hrad', which is the category of no record"):
        spooled(tmp_path / "b", path, settings_of(tokenizer, source=source))
    assert tokenised
    assert "of source 'own' no record has the category 'hrad'" in capsys.readouterr().err
    # Of a part that was asked for, the rare categories may be missing.
    monkeypatch.undo()
    weights = {"hard": 2.0}
    for part in (replace(source, max_records=20), replace(source, reading=replace(source.reading, share=0.02, seed=1))):
        spool = spooled(
            tmp_path / f"part{part.max_records}",
            path,
            settings_of(tokenizer, source=replace(part, loss_weights=weights)),
        )
        assert "hard" not in spool.categories["own"] and spool.categories["own"]["easy"]
    # A column of weights that is not there counted every record as 1 without a word.
    monkeypatch.undo()
    misspelt = ChatSource("own", chat_spool.chat_reading({"loss_weight": "weihgt"}, "skip"))
    with pytest.raises(UserError, match="no record has a field 'weihgt', which `columns` names as loss_weight"):
        spooled(tmp_path / "w", path, settings_of(tokenizer, source=misspelt))
    # What is met early needs no further reading, and what cannot be read is the business of those who read it.
    spooled(tmp_path / "c", path, settings_of(tokenizer, source=replace(source, loss_weights={"easy": 2.0})))
    assert "warning" not in capsys.readouterr().err
    path.write_text("{\n")
    stopping = replace(source, reading=chat_spool.chat_reading({"category": "level"}, "stop"))
    with pytest.raises(UserError, match="malformed JSON"):
        spooled(tmp_path / "d", path, settings_of(tokenizer, source=stopping))


def test_a_weight_in_csv_is_the_number_that_its_text_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ChatSource("own", chat_spool.chat_reading({"loss_weight": "w"}, "stop"))
    path = tmp_path / "own.csv"
    path.write_text("question,answer,w\n1?,1,0.25\n2?,2,\n3?,3,0\n4?,4, 2e0\n", encoding="utf-8")
    folder, outcomes, _ = run(tmp_path / "a", [path], settings_of(tokenizer, source=source))
    assert {weight for _, mask in sequences_in(folder) for weight in mask} == {0.0, 0.25, 1.0, 2.0}
    assert outcomes["kept"] == 3 and outcomes["loss weight 0"] == 1
    for text in ("much", "-1", "nan", "inf"):
        path.write_text(f"question,answer,w\n1?,1,1\n2?,2,{text}\n", encoding="utf-8")
        with pytest.raises(UserError, match=r"own.csv:2: loss_weight must be a number from 0 on"):
            run(tmp_path / text, [path], settings_of(tokenizer, source=source))


def test_what_only_the_users_template_shows_makes_another_conversation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.mood }}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% endfor %}"
    )
    talks = [("glad", 1), ("sad", 2), ("sad", 3)]  # the number is shown by no template
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Hi", "mood": mood, "number": n},
                {"role": "assistant", "content": "a"},
            ]
        }
        for mood, n in talks
    ]
    path = write(tmp_path / "own.jsonl", rows)
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    duplicates = {
        name: run(tmp_path / str(number), [path], settings_of(tokenizer, name, source=source))[2].duplicates
        for number, name in enumerate(("nano3", str(template)))
    }
    assert list(duplicates.values()) == [2, 1]


# --- What is said about a source --------------------------------------------------------------------------------------


def spooled(folder: Path, path: Path, how: ChatSettings) -> chat_spool.Spool:
    plan = chat_spool.plan_tokenize(how, {name: list_files([str(path)]) for name in how.sources}, 30_000)
    freeze(plan, folder)
    return chat_spool.tokenize_conversations(plan, folder, how, SerialEngine())


def test_a_source_that_is_mostly_dropped_says_why_and_what_helps(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    long = {"prompt": "Count.", "completion": "one two " * 100}
    rows = [{"question": f"{n}?", "answer": f"{n}!", "mood": "glad"} for n in range(3)]
    path = write(tmp_path / "own.jsonl", [*rows, *[long] * 4])
    how = settings_of(tokenizer, source=source, seq_len=64)
    spool = spooled(tmp_path / "a", path, how)
    capsys.readouterr()
    spool.check_own("own", how)
    said = capsys.readouterr().err
    assert "source 'own': 4 of 7 read are dropped: 4 longer than seq_length" in said
    longest = encode_conversations([Conversation("x", to_messages(long), "train")], tokenizer, "nano3")[0][0].size
    assert f"the longest has {longest} tokens, a row 64" in said and "packing.too_long=cut" in said
    how = replace(how, seq_len=8)
    with pytest.raises(UserError, match="nothing is left of 7 read: 7 longer than seq_length"):
        spooled(tmp_path / "b", path, how).check_own("own", how)
    spooled(tmp_path / "c", path, replace(how, seq_len=1024)).check_own("own", how)
    assert "dropped" not in capsys.readouterr().err
    path = write(tmp_path / "other.jsonl", [{"q": "2?", "a": "2"}] * 3)
    how = replace(how, sources={"own": replace(source, reading=chat_spool.chat_reading({}, "skip"))})
    with pytest.raises(UserError, match="nothing is left of 3 read: 3 no conversation in it") as raised:
        spooled(tmp_path / "d", path, how).check_own("own", how)
    assert "other.jsonl:1: no conversation in it: its fields are 'q', 'a'" in (raised.value.hint or "")


def test_dropped_sequences_are_counted_among_sequences(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [
        message
        for n in range(6)
        for message in (
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": "one two " * 10, "reasoning_content": "so"},
        )
    ]
    path = write(tmp_path / "own.jsonl", [{"messages": turns}])
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    conversation = Conversation("own", turns, "train")
    lengths = [
        len(ids) for ids, _ in encode_conversations(list(training_spans(conversation, "nano3")), tokenizer, "nano3")
    ]
    assert len(lengths) == 6
    for kept in (4, 2, 0):  # of one record: the longest prefixes are too long
        how = settings_of(tokenizer, source=source, seq_len=sorted(lengths)[kept] - 1)
        spool = spooled(tmp_path / str(kept), path, how)
        assert (spool.table.counts["own"]["kept"], spool.table.counts["own"]["read"]) == (kept, 1)
        capsys.readouterr()
        if not kept:
            with pytest.raises(UserError, match="nothing is left of 6 sequences: 6 longer than seq_length"):
                spool.check_own("own", how)
            continue
        spool.check_own("own", how)
        assert ("4 of 6 sequences are dropped: 4 longer" in capsys.readouterr().err) == (kept == 2)


def test_a_refusal_shows_a_record_of_its_own_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reading = chat_spool.chat_reading({}, "skip")
    how = settings_of(tokenizer)
    how = replace(how, sources={name: ChatSource(name, reading) for name in ("first", "second")})
    files = {
        name: list_files([str(write(tmp_path / f"{name}.jsonl", [{f"{name} q": "2?", "a": "2"}] * 2))])
        for name in how.sources
    }
    plan = chat_spool.plan_tokenize(how, files, 30_000)
    freeze(plan, tmp_path / "spool")
    spool = chat_spool.tokenize_conversations(plan, tmp_path / "spool", how, SerialEngine())
    for name in how.sources:
        with pytest.raises(UserError, match=f"source '{name}': nothing is left") as raised:
            spool.check_own(name, how)
        assert f"{name}.jsonl:1: no conversation in it: its fields are '{name} q'" in (raised.value.hint or "")


def test_keys_that_are_not_used_are_listed_and_reasoning_is_known(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    talk = [{"role": "user", "content": "Hi", "mood": "glad"}, {"role": "assistant", "content": "Ho", "thinking": "so"}]
    path = write(tmp_path / "own.jsonl", [{"messages": talk}, {"question": "2?", "answer": "2", "reasoning": "it is"}])
    spool = spooled(tmp_path / "a", path, settings_of(tokenizer, source=source))
    unused = "own: keys of messages that the chat template does not show: 'mood' (1)"
    assert spool.notes(settings_of(tokenizer, source=source)) == [unused]
    assert spool.reasons(settings_of(tokenizer, source=source)) and spool.reasoning == 2
    path = write(tmp_path / "own.jsonl", [asked(n) for n in range(3)] + [{"messages": talk}])
    spool = spooled(tmp_path / "b", path, settings_of(tokenizer, source=source))
    assert spool.reasons(settings_of(tokenizer, source=source)) is False
    (tmp_path / "own.jinja").write_text("{{ messages }}", encoding="utf-8")  # cannot be asked to reason, or not to
    own_template = replace(settings_of(tokenizer, source=source), template=str(tmp_path / "own.jinja"))
    assert spool.reasons(own_template) is None


def test_a_source_of_text_is_trained_whole_and_without_a_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = ChatSource("own", chat_spool.chat_reading({"text": "body"}, "skip"), train_on="last")
    texts = ["def f(x): return x", "def f(x): return x", "Ho <|im_end|>", " "]
    path = write(tmp_path / "own.jsonl", [{"body": text, "question": "2?", "answer": "2"} for text in texts])
    how = settings_of(tokenizer, source=source)
    spool = spooled(tmp_path / "a", path, how)
    assert spool.table.counts["own"] == {"read": 4, "kept": 2, "control token in a message": 1, "no text in it": 1}
    (shard,) = (tmp_path / "a").rglob("*.ids")
    ids = tokenizer.encode(texts[0], add_special_tokens=False).ids
    assert np.fromfile(shard, "<i4").tolist() == ids * 2
    assert np.fromfile(shard.with_suffix(".mask"), np.uint8).tolist() == ([1] * (len(ids) - 1) + [0]) * 2
    assert spool.reasons(how) is False


def test_columns_say_which_fields_are_the_conversation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl", [{"messages": [{"from": "x"}], "q": {"text": "2?"}, "a": "2", "instruction": "z"}]
    )
    columns = {"question": "q.text", "answer": "a"}
    source = ChatSource("own", chat_spool.chat_reading(columns, "stop"))
    folder, _, _ = run(tmp_path / "a", [path], settings_of(tokenizer, source=source))
    assert trained_text(folder, tokenizer) == ["2<|im_end|>"]
    source = replace(source, reading=chat_spool.chat_reading({"question": "q.txt", "answer": "a"}, "stop"))
    with pytest.raises(UserError, match=r"field 'q\.txt' is missing"):
        run(tmp_path / "b", [path], settings_of(tokenizer, source=source))
    path = write(tmp_path / "other.jsonl", [{"talk": asked(1)["conversations"]}])
    source = ChatSource("own", chat_spool.chat_reading({}, "stop"))
    with pytest.raises(UserError, match=r"other\.jsonl:1: no conversation in it: its fields are 'talk'") as raised:
        run(tmp_path / "c", [path], settings_of(tokenizer, source=source))
    assert "columns: {messages: talk}" in (raised.value.hint or "")


def test_a_conversation_of_which_no_turn_is_trained_is_counted_under_every_template() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0}]
    settings = ChatSettings("", "nano2", 100, "drop", 0.0, 0.0, 1, {})
    outcomes: Counter[str] = Counter()
    source = ChatSource("mine", chat_spool.chat_reading({}, "stop"))
    assert not list(chat_spool._spans([Conversation("mine", messages, "train")], source, settings, outcomes))
    assert outcomes == {"nothing to train on": 1}


def test_rows_say_how_many_tokens_are_trained_of_a_whole_conversation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = records(60, seed=11)
    path, how = write(tmp_path / "own.jsonl", made), settings_of(tokenizer)
    folder, _, _ = run(tmp_path / "w", [path], how, shard_bytes=3_000, conversation_tokens=True)
    trained: dict[tuple[int, ...], set[int]] = {}  # token ids of a sequence -> of the conversations that it may be of
    for record in made:
        parts = [(tuple(ids), sum(mask)) for ids, mask in slow_sequences(record, "nano3", tokenizer) if any(mask)]
        for ids, _ in parts:
            trained.setdefault(ids, set()).add(sum(count for _, count in parts))
    of_several, conversations = 0, 0.0
    for file in folder.rglob("*.parquet"):
        for row in pq.read_table(file).to_pylist():
            bounds = [*row["seq_start_id"], len(row["input_ids"])]
            for (begin, end), total in zip(pairwise(bounds), row["conversation_tokens"], strict=True):
                assert total in trained[tuple(row["input_ids"][begin:end])]
                own = sum(row["loss_mask"][begin:end])
                of_several += own < total
                conversations += own / total
    assert of_several > 5 and conversations == pytest.approx(60)


def test_of_an_equal_sequence_only_one_conversation_has_the_tokens() -> None:
    """Conversations 0 and 1 begin alike: what is left out as equal is no part of the other, in any epoch."""
    sequences = made_up([10, 20, 10, 30], [0, 0, 0, 0], [1, 2, 1, 3])
    sequences["conversation"], sequences["trained"] = [0, 0, 1, 1], [4, 8, 4, 16]
    chosen = chat_pack.choose(sequences, ["a"], weights=None, repeats={"a": 2}, num_tokens=None).splits["train"]
    tokens = dict(zip(chosen.tolist(), chat_pack.conversation_tokens(sequences, chosen).tolist(), strict=True))
    assert len(chosen) == 6 and tokens == {0: 12, 1: 12, 3: 16}


def test_a_conversation_that_the_users_template_refuses_is_named_or_left_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    twice = {"messages": [{"role": "user", "content": "Hi"}] * 2 + [{"role": "assistant", "content": "Ho"}]}
    path = write(tmp_path / "own.jsonl", [asked(1), twice, asked(2)])
    how = settings_of(tokenizer, str(template), source=ChatSource("own", chat_spool.chat_reading({}, "skip")))
    _, outcomes, _ = run(tmp_path / "skip", [path], how)
    assert outcomes["refused by the chat template"] == 1 and outcomes["kept"] == 2
    how = replace(how, sources={"own": ChatSource("own", chat_spool.chat_reading({}, "stop"))})
    with pytest.raises(UserError, match=r"own.jsonl:2: chat template .*own.jinja: roles must alternate"):
        run(tmp_path / "stop", [path], how)


def test_a_record_may_say_that_it_asks_for_low_effort(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = [record | {"brief": number % 3 == 0} for number, record in enumerate(records(12, seed=12))]
    source = ChatSource("own", replace(READING, columns=FIELDS | {"brief": "brief"}), effort_column="brief")
    path = write(tmp_path / "own.jsonl", made)
    folder, _, _ = run(tmp_path / "w", [path], settings_of(tokenizer, "super3", source=source))
    texts = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids, _ in sequences_in(folder)]
    expected = sum(len(slow_ends(record["messages"], "super3")) for record in made if record["brief"])
    assert sum("{reasoning effort: low}" in text for text in texts) == expected > 3
