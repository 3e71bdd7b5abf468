"""References are parsed to what they say."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.artifacts.naming import Reference, check_name, parse_reference
from nemo_runspec.errors import UserError

ALPHANUMERIC = string.ascii_letters + string.digits
names = st.builds("{}{}".format, st.sampled_from(ALPHANUMERIC), st.text(ALPHANUMERIC + "._-", max_size=40))
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
