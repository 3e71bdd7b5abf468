"""JSON Lines that this project wrote itself, read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.data_prep.work.jsonl import write_jsonl


@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=8), st.integers(), st.none())), max_size=5)
)
def test_jsonl_round_trips(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    write_jsonl(path, rows)
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == rows
