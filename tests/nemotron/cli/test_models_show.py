"""`models show`: the whole command as a user runs it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from nemotron.stack.models.published.presets import PRESETS

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[[str], str]
NAMES = ", ".join(PRESETS)


def test_the_page_of_a_preset(here: Nemotron) -> None:
    done = here("models show nano3-30b --seq-length=4096")
    assert done.returncode == 0, done.stderr
    assert "31.578 B" in done.stdout and "3.228 B" in done.stdout and "in sequences of 4,096" in done.stdout


def test_json(here: Nemotron) -> None:
    done = here("models --debug show --json super3-120b")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"]["total"] == 120_668_687_360


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("models show", "which model?", f"presets: {NAMES}"),
        ("models show nano3-30", "artifact 'nano3-30'", f"did you mean nano3-30b? presets: {NAMES}"),
        ("models show llama", "no preset, directory or artifact 'llama'", f"presets: {NAMES}"),
        ("models show nano3-sft-model-tiny", "no artifact 'nano3-", "make it: nemotron nano3 sft -c tiny"),
        ("models show nano3-30b --seq-length 0", "greater than or equal to 1", "see: nemotron models show --help"),
        ("models show nano3-30b --jsn", "--jsn (Possible options: --json)", "see: nemotron models show --help"),
        ("models shw", "Did you mean 'show'?", "see: nemotron models --help"),
    ],
)
def test_a_mistake_is_refused_in_two_lines(line: str, message: str, hint: str, refused: Refused) -> None:
    first, second = refused(line).splitlines()
    assert first.startswith("error: ") and message in first
    assert second.startswith(hint)
