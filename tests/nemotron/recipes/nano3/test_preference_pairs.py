"""Preference pairs from a user's file to tokens: what is kept, what is left out and why, and what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.conversations import ConversationTable
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import read_piece, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit.chat import UntrainableError
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.schemas.sources import PrepRunConfig
from nemotron.recipes.nano3.stage2_rl.data_prep_pairs import _check_source, as_pair
from nemotron.recipes.nano3.stage2_rl.dpo import read_pairs
from nemotron.recipes.nano3.stage2_rl.pairs_schema import PairsConfig, SourceConfig

CALCULATOR = {"name": "calculator", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "calculator", "arguments": {"x": "2+2"}}]}
USER = {"role": "user", "content": "What is 2+2?"}
RIGHT = {"role": "assistant", "content": "four"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["What is 2+2? four five calculator"], 400)


def write(path: Path, *records: dict[str, Any]) -> Path:
    """As the data steps write them: as text, not as escapes."""
    write_jsonl(path, records)
    return path


def test_only_the_rejected_answer_may_call_a_tool_that_is_not_declared() -> None:
    pair = as_pair({"prompt": "What is 2+2?", "chosen": "four", "rejected": [CALL], "category": "no tools"})
    assert pair == {"prompt": [USER], "chosen": [RIGHT], "rejected": [CALL], "category": "no tools"}
    with pytest.raises(UntrainableError, match="calls 'calculator', which is not declared"):
        as_pair({"prompt": "What is 2+2?", "chosen": [CALL], "rejected": "four"})
    declared = as_pair({"prompt": "What is 2+2?", "chosen": [CALL], "rejected": "four", "tools": [CALCULATOR]})
    assert declared["tools"] == [CALCULATOR]


@pytest.mark.parametrize(
    ("rejected", "message"),
    [
        ([{"role": "assistent", "content": "five"}], "rejected: message 1: unknown role 'assistent'"),
        ([{"role": "tool", "content": "five"}], "rejected has no assistant turn after the prompt"),
        ([{"role": "assistant", "content": "five", "image": b"x"}], "messages must be JSON: .* bytes"),
    ],
)
def test_a_rejected_answer_is_checked_too(rejected: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_pair({"prompt": "What is 2+2?", "chosen": "four", "rejected": rejected})


def test_what_is_learned_is_what_the_model_writes_after_the_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    earlier = [USER, {"role": "assistant", "content": "five"}, USER]
    results = [CALL, {"role": "tool", "content": "five"}, RIGHT]
    path = write(
        tmp_path / "train.jsonl", {"prompt": earlier, "tools": [CALCULATOR], "chosen": results, "rejected": [RIGHT]}
    )
    (pair,), left_out = read_pairs(path, tokenizer, "nano3", 2000)
    assert not left_out

    def learned(answer: Any) -> str:
        ids = [token for token, predicts in zip(answer.ids[1:], answer.predicts, strict=False) if predicts]
        return tokenizer.decode(ids, skip_special_tokens=False)

    assert learned(pair.rejected) == "four<|im_end|>"
    call = (
        "\n<tool_call>\n<function=calculator>\n<parameter=x>\n2+2\n</parameter>\n</function>\n</tool_call>\n<|im_end|>"
    )
    assert learned(pair.chosen) == f"{call}four<|im_end|>"


def test_pairs_that_cannot_be_learned_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    good = {"prompt": [USER], "chosen": [RIGHT], "rejected": [{"role": "assistant", "content": "five"}]}
    forged = {**good, "rejected": [{"role": "assistant", "content": "five<|im_end|>"}]}
    long = {**good, "chosen": [{"role": "assistant", "content": "four " * 200}]}
    pairs, left_out = read_pairs(write(tmp_path / "train.jsonl", good, forged, long), tokenizer, "nano3", 150)
    assert len(pairs) == 1
    assert dict(left_out) == {
        "with a control token of the chat template in a text": 1,
        "longer than policy.max_total_sequence_length 150": 1,
    }


def test_pairs_in_a_table_are_those_in_lines(tmp_path: Path) -> None:
    """A column of Parquet has one type: it gives every call the arguments of all calls, null where they were not."""
    add = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": "2", "b": "2"}}]}
    tools = json.dumps([CALCULATOR, {"name": "add", "parameters": {"type": "object"}}])
    records = [{"prompt": [USER], "chosen": [call], "rejected": [RIGHT], "tools": tools} for call in (CALL, add)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    in_lines = list_files([str(write(tmp_path / "a.jsonl", *records))])
    lines, table = (
        [as_pair(row.value) for row in read_piece(whole(file), Reading(required=(), rest=True), ReadReport())]
        for [file] in (in_lines, list_files([str(tmp_path / "a.parquet")]))
    )
    assert lines == table and lines[0]["chosen"][0]["tool_calls"][0]["arguments"] == {"x": "2+2"}


def test_a_source_without_a_pair_is_refused(tmp_path: Path) -> None:
    (tmp_path / "headed.csv").write_text("prompt,chosen,rejected\n")
    cfg = PairsConfig(
        run=PrepRunConfig(script="data_prep_pairs.py", output="pairs"),
        sources=[SourceConfig(name="own", paths=[str(tmp_path / "headed.csv")])],
    )
    report = ReadReport()
    assert not list(read_piece(whole(list_files(cfg.sources[0].paths)[0]), Reading(required=()), report))
    with pytest.raises(UserError, match="source 'own' is empty"):
        _check_source(cfg, cfg.sources[0], ConversationTable(), report)


def test_a_line_of_the_file_ends_at_a_line_feed_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pair = {"prompt": [{"role": "user", "content": "2+2?\u2028Say it."}], "chosen": [RIGHT], "rejected": [RIGHT]}
    pairs, _ = read_pairs(write(tmp_path / "train.jsonl", pair, pair), tokenizer, "nano3", 500)
    assert len(pairs) == 2
