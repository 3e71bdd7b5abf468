"""Limits of the heuristic filters of a curation."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import Group


class LimitConfig(Group):
    """A document passes with a value of at least `low` and at most `high`."""

    low: float | None = Field(None, description="least value; null: none")
    high: float | None = Field(None, description="greatest value; null: none")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} exceeds high {self.high:g}: no document would pass")
        return self

    def allow(self, value: float) -> bool:
        """Whether a document of this value passes."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
