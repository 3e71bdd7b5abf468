"""Filters and duplicates of a corpus that fits in memory, in one pass (`heuristics` and `deduplication` take any)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemotron.data_prep.curation.deduplication.exact import text_hash
from nemotron.data_prep.curation.heuristics import first_failure
from nemotron.data_prep.sources.documents import normalise
from nemotron.kit.schemas.limits import LimitConfig


def filter_and_deduplicate(
    texts: Mapping[str, Sequence[str]], limits: Mapping[str, LimitConfig | None]
) -> dict[str, list[str]]:
    """The texts of each split, normalised, that are not empty, pass the filters of `limits` and did not occur before.

    Splits come in their order: of equal texts (but for whitespace) that of the first split stays.
    """
    seen, kept = set[bytes](), {split: list[str]() for split in texts}
    for split, raw in texts.items():
        for text in map(normalise, raw):
            key = text_hash(text, "whitespace")
            if text and key not in seen and first_failure(text, limits) is None:
                seen.add(key)
                kept[split].append(text)
    return kept
