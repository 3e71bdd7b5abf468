"""JSON Lines that this project wrote itself, read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.kit.jsonl import read_own_jsonl, write_jsonl


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=8), st.integers(), st.none())), max_size=5)
)
def test_jsonl_round_trips(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    write_jsonl(path, rows)
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == rows


def test_a_file_of_the_user_is_read_to_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes('\ufeff{"a": "one\u2028line"}\n\n{"b": 1}\n'.encode())
    assert list(read_own_jsonl(path)) == [(f"{path}:1", {"a": "one\u2028line"}), (f"{path}:3", {"b": 1})]
    for content, complaint in (
        (b"[1]", "x.jsonl:1: must be an object"),
        (b"{", "x.jsonl:1: not JSON"),
        (b"\xff", "cannot read"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=complaint):
            list(read_own_jsonl(path))
