"""Limits of the heuristic filters of a curation."""

from __future__ import annotations

from pydantic import Field

from nemotron.kit.schemas.group import Group


class LimitConfig(Group):
    """A document passes with a value of at least `low` and at most `high`."""

    low: float | None = Field(None, description="least value; null: none")
    high: float | None = Field(None, description="greatest value; null: none")

    def allow(self, value: float) -> bool:
        """Whether a document of this value passes."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
