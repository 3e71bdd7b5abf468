"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Rows as lines, columns two blanks apart; `align` has a < or > a column."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]
