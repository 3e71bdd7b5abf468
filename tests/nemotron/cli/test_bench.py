"""nemotron bench: what a command line may ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("budget", ["inf", "-inf", "nan", "-1", "1e30"])
def test_a_budget_that_is_no_number_of_seconds_is_refused(refused: Callable[[str], str], budget: str) -> None:
    said = refused(f"bench research --budget={budget}")
    assert said.startswith("error: Invalid value for '--budget'") and len(said.splitlines()) <= 2, said
