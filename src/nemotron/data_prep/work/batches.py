"""Consecutive items in batches of bounded size, which need not all be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], max_size: int, max_items: int | None = None
) -> Iterator[list[Item]]:
    """Batches of at most `max_size` together and at most `max_items`; a larger item is a batch of its own."""
    batch: list[Item] = []
    size = 0
    for item in items:
        item_size = size_of(item)
        if batch and (size + item_size > max_size or len(batch) == max_items):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item_size
    if batch:
        yield batch
