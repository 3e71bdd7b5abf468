"""The line of every key, where TOML makes it hard to see."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemo_runspec.toml_text import read_toml

TRICKY = '''\
# a = 0
a = 1 # b = 2
"b.c" = "[not] a = header"
d . 'e f' = """
a = 9
[none]
\\"""
x"""  # one """ more

[t] # [u]
list = [
  "key = 1", # ]
  'k = [',
  [ 2, { x = 1 } ],
]
after = { in = "}", line = [ "#" ] }
lit = \'\'\'
[u]
\'\'\'
empty = ""
[ t . "q.r" ]
z = 2001-01-01
[[many]]
n = 1
[[many]]
n = 2
'''
LINES = {
    ("a",): 2,
    ("b.c",): 3,
    ("d",): 4,
    ("d", "e f"): 4,
    ("t",): 10,
    ("t", "list"): 11,
    ("t", "after"): 16,
    ("t", "lit"): 17,
    ("t", "empty"): 20,
    ("t", "q.r"): 21,
    ("t", "q.r", "z"): 22,
    ("many",): 23,
    ("many", "n"): 24,
}


@pytest.mark.parametrize("text", [TRICKY, TRICKY.replace("\n", "\r\n")])
def test_what_only_looks_like_a_key_is_none(text: str) -> None:
    toml = read_toml(text, "f")
    assert toml.lines == LINES
    assert toml.data == tomllib.loads(text)
    assert toml.where("t", "after", "in") == "f:16"
    assert toml.where("nothing") == "f"


def test_a_block_that_begins_further_down() -> None:
    assert read_toml("[a]\nb = 1", "s.py", first_line=5).where("a", "b") == "s.py:6"
    with pytest.raises(UserError, match=r"^s\.py:6: bad TOML: invalid value$"):
        read_toml("[a]\nb =", "s.py", first_line=5)
    with pytest.raises(UserError, match=r"^s\.py:7: bad TOML"):
        read_toml('a = 1\nb = [1,\n"x"', "s.py", first_line=5)


TEXTS = st.text(st.sampled_from("ab=[]{}#\"'\n,. \\"), max_size=12)
KEYS = st.sampled_from(["a", "b", "a.b", "=", "#", "[x]", '"', "'"])


@given(st.lists(st.tuples(KEYS, TEXTS, st.sampled_from(["basic", "multi", "array"])), max_size=6))
def test_any_values_before_a_key_leave_its_line_alone(entries: list[tuple[str, str, str]]) -> None:
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    for number, (key, text, kind) in enumerate(entries):
        name = f"{key}{number}"
        expected[(name,)] = len(lines) + 1
        lines += f"{quoted(name)} = {written(text, kind)}".split("\n")
    toml = read_toml("\n".join(lines), "f")
    assert toml.lines == expected
    values: list[Any] = list(toml.data.values())
    assert [value if isinstance(value, str) else value[0]["k"] for value in values] == [text for _, text, _ in entries]


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def written(text: str, kind: str) -> str:
    if kind == "multi":
        return '"""\n' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'
    return quoted(text) if kind == "basic" else f"[ # [\n  {{ k = {quoted(text)} }},\n]"
