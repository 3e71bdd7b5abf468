"""References are parsed to what they say, and a name tells the command that makes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.artifacts.naming import Reference, check_name, hint_for, parse_reference
from nemo_runspec.errors import UserError

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,40}\Z")
digests = st.text("0123456789abcdef", min_size=8, max_size=64)


@given(names, st.none() | st.integers(1, 10**9), st.none() | digests, st.booleans())
def test_a_reference_survives_writing_and_reading(name, version, digest, scheme):
    reference = Reference(name, version, digest)
    assert parse_reference(("art://" if scheme else "") + str(reference)) == reference


def test_latest_is_the_same_as_no_version():
    assert parse_reference("art://a-b.c:latest") == parse_reference("a-b.c") == Reference("a-b.c", None, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":3",
        "a:",
        "a:0",
        "a:03",
        "a:-1",
        "a:x",
        "a:1@",
        "a:1@short",
        "a:1@ABCDEF01",
        "a/b",
        ".a",
        "../a:1",
        "a b",
        "s3://a",
    ],
)
def test_what_is_no_reference_is_refused_with_the_grammar(text):
    with pytest.raises(UserError) as refused:
        parse_reference(text)
    assert repr(text)[1:-1] in refused.value.message and "name:3" in refused.value.hint


@pytest.mark.parametrize("name", ["", ".aside", "a/b", "a:b", "a@b", "x" * 129, "a\n"])
def test_bad_names(name):
    with pytest.raises(UserError):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nano3-pretrain-data-tiny", "nemotron nano3 data prep pretrain -c tiny"),
        ("nano3-sft-model-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-sft-results-tiny", "nemotron nano3 sft -c tiny"),
        ("nano3-eval-results-tiny", "nemotron nano3 eval -c tiny"),
        ("super3-rl-rlvr-model-long_context", "nemotron super3 rl rlvr -c long_context"),
        ("nano3-sft-data-my-own", "nemotron nano3 data prep sft -c my-own"),
        ("nemotron_cc-fuzzy_dedup-data-tiny", "nemotron data curate fuzzy_dedup -c tiny"),
        ("nemotron_cc-data-my-own", "nemotron data curate -c my-own"),
        ("pack-data-nano3_sft", "nemotron data pack -c nano3_sft"),
        ("tokenize-data-my-own", "nemotron data tokenize -c my-own"),
        ("my-model", None),
        ("nano3-sft-weights-tiny", None),
    ],
)
def test_hint_follows_the_naming_rule(name, command):
    assert hint_for(name) == command
