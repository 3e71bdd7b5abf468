"""Batches: everything once, in order, within both bounds."""

from __future__ import annotations

from nemotron.data_prep.work.batches import batches


def test_order_and_both_bounds() -> None:
    sizes = [3, 3, 3, 20, 0, 1, 9]
    assert list(batches(sizes, int, 9)) == [[3, 3, 3], [20], [0, 1], [9]]
    assert list(batches(iter(sizes), int, 9, 2)) == [[3, 3], [3], [20], [0, 1], [9]]
    assert not list(batches([], int, 9))
