"""nemotron bench: what a command line may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("budget", ["inf", "-inf", "nan", "-1", "1e30"])
def test_a_budget_that_is_no_number_of_seconds_is_refused(nemotron: Callable[..., Any], budget: str) -> None:
    done = nemotron(f"bench research --budget={budget}")
    assert done.returncode == 2 and done.stderr.startswith("error: Invalid value for '--budget'"), done.stderr
    assert len(done.stderr.splitlines()) <= 2
