"""The YAML dialect of configs: no surprises when read, nothing lost when written."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_runspec.config.yaml_text import dump_yaml, escape_interpolation, read_scalar, read_yaml, spelled
from nemo_runspec.errors import UserError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(min_size=1, max_size=8), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3E+4", 30000.0),
        ("1_000", 1000),
        ("-7", -7),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("0x10", 16),
        ("007", "007"),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("name:3", "name:3"),
        ("MEM*EME", "MEM*EME"),
        ("null", None),
        ("", ""),
        ("'5'", "5"),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("${mul:2,3}", "${mul:2,3}"),
        ("a=b", "a=b"),
        ("C#", "C#"),
        ("'run #3'", "run #3"),
        ('["a #b", c#]', ["a #b", "c#"]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    read = read_scalar(text, "here")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["run #3", "#3", "1e-3 # lower", "[a] #b", "'a' # b", "a\nb #c"])
def test_a_comment_is_no_part_of_a_value_that_may_be_lost(text: str) -> None:
    with pytest.raises(UserError, match=r"^here: .* what follows the # would be a comment\n"):
        read_scalar(text, "here")


@given(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=2))
@example({"a": ["1e-5", "yes", "12:30", "null", "~", "", "0x10", "007", "<<", "=", "2026-01-31", "- x", "a: b", "#"]})
def test_what_is_written_reads_back_with_the_same_types(values: dict[str, Any]) -> None:
    read, _ = read_yaml(dump_yaml(values, escape=False), "f")
    assert read == values
    assert repr(read) == repr(values)  # 1 and 1.0 and True are equal, and not the same


@given(st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=3), st.text(alphabet="\\${}a:,'\"", max_size=12)))
@example({"a": "${b}", "b": "\\${b}", "c": "\\\\${x"})
def test_an_escaped_interpolation_is_the_text_itself(values: dict[str, str]) -> None:
    # Without a `${` OmegaConf leaves a string alone, "???" aside; with one it unescapes.
    tree = OmegaConf.create(escape_interpolation(values))
    assert OmegaConf.to_container(tree, resolve=True) == values


def test_every_key_knows_its_line() -> None:
    _, lines = read_yaml("a: 1\nb:\n  c: [1,\n    2]\n  d:\n  - x\n", "f.yaml")
    assert lines == {
        ("a",): "f.yaml:1",
        ("b",): "f.yaml:2",
        ("b", "c"): "f.yaml:3",
        ("b", "c", 0): "f.yaml:3",
        ("b", "c", 1): "f.yaml:4",
        ("b", "d"): "f.yaml:5",
        ("b", "d", 0): "f.yaml:6",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2", "f.yaml:3: malformed YAML: "),
        ("a: 1\n\tb: 2", "f.yaml:2: malformed YAML: "),
        ("a: 1\nb:\n  c: 1\n  c: 2", "f.yaml:4: b.c stands twice"),
        ("a: 1\nb: &b\n  c: [1, *b]", "f.yaml:2: b.c.1 is an alias of what it stands in"),
        ("? [a]\n: 1", "f.yaml:1: a key of a config is one word"),
        ("a: *x", "f.yaml:1: malformed YAML: found undefined alias"),
        ("a: !!python/object:os.system x", "f.yaml:1: malformed YAML: could not determine a constructor"),
        ("a: !!timestamp 2020-01-01", "f.yaml:1: malformed YAML: could not determine a constructor"),
        ("a: !!set {x}", "f.yaml:1: malformed YAML: could not determine a constructor"),
        ("a: !!binary aGk=", "f.yaml:1: malformed YAML: could not determine a constructor"),
        ('a: !!int ""', "f.yaml: malformed YAML: "),
        ("a: !!bool foo", "f.yaml: malformed YAML: "),
        ("a: \x1b[31m", "f.yaml: malformed YAML: "),
        ("[" * 200_000 + "]" * 200_000, "f.yaml: malformed YAML: nested too deeply"),
        ("{a: [1", "f.yaml:1: malformed YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n---\nb: 2", "f.yaml:2: malformed YAML: "),
    ],
)
def test_malformed_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_yaml(text, "f.yaml")
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_keys_are_what_is_written() -> None:
    assert read_yaml("{1: a, true: b, null: c, 1e-3: d, yes: e}", "f.yaml")[0] == {
        "1": "a", "true": "b", "null": "c", "1e-3": "d", "yes": "e"
    }  # fmt: skip
    assert read_yaml("x: &x {a: 1}\ny: {<<: *x, b: 2}", "f.yaml")[0]["y"] == {"a": 1, "b": 2}
    assert read_yaml("{&k 1: x, b: *k}", "f.yaml")[0] == {"1": "x", "b": 1}
    with pytest.raises(UserError, match="command line: a stands twice"):
        read_scalar("{a: 1, a: 2}", "command line")


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.0e-3, "0.004"), (1e-8, "1e-08"), (1.0, "1"), (0.00123456789, "0.00123456789"), (1.5e7 + 1, "15000001.0")],
)
def test_a_number_is_spelled_with_all_its_digits(value: float, text: str) -> None:
    assert spelled(value) == text
