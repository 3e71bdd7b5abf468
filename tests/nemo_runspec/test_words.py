"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from nemo_runspec.words import counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (2000, "2,000 files")])
def test_one_thing_has_no_s(count: int, text: str) -> None:
    assert counted(count, "file") == text
