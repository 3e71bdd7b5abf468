"""The unit that data preparation works on: one text with its source, its kind and the split that it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prose", "code", "task"]
Split = Literal["train", "valid"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text.

    `source` is the name that blend weights refer to. `id` is unique within the source and says where the text came from
    (`argparse:3`, `notes.jsonl:17`). `kind` decides which quality heuristics apply: generated tasks have none.
    """

    source: str
    id: str
    text: str
    kind: Kind
    split: Split


def stable_hash(*parts: str) -> int:
    """64-bit hash of strings that is the same in every process and on every machine (Python's own is salted)."""
    return int.from_bytes(hashlib.blake2b("\x00".join(parts).encode(), digest_size=8).digest(), "big")


def split_of(key: str, valid_fraction: float, seed: int) -> Split:
    """Deterministic split by the hash of `key`; about `valid_fraction` of all keys are held out.

    Equal keys always land in the same split, whatever else is in the data and in whatever order it is read.
    """
    return "valid" if stable_hash("split", str(seed), key) < valid_fraction * 2**64 else "train"
