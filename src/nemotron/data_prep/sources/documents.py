"""The unit that data preparation works on: one text with its source, its kind and the split that it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records that no document was made of. `samples`: where some of them are, and what is wrong with each."""

    source: str
    reason: str
    count: int
    samples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Documents that are yet to be extracted: `read(*arguments)` yields them, in whichever process it is called.

    `name` says in an error what they are. `read` is a module's function, so that another process can import it.
    `source`: whose they are, if all are of one.
    """

    name: str
    read: Callable[..., Iterable[Document | Skipped]]
    arguments: tuple[Any, ...]
    source: str | None = None

    def documents(self) -> Iterable[Document | Skipped]:
        """Extract the documents."""
        return self.read(*self.arguments)


def in_parts(documents: Iterable[Document | Skipped], size: int = 256) -> Iterator[Part]:
    """Documents that are there already, `size` of them a part; the last one may be smaller."""
    iterator = iter(documents)
    while batch := list(islice(iterator, size)):
        first, last = batch[0], batch[-1]
        yield Part(f"{_name(first)} to {_name(last)}", iter, (batch,))


def _name(item: Document | Skipped) -> str:
    return f"{item.source} {item.id if isinstance(item, Document) else item.reason}"


def stable_hash(*parts: str) -> int:
    """64-bit hash of strings that is the same in every process and on every machine (Python's own is salted)."""
    return int.from_bytes(hashlib.blake2b("\x00".join(parts).encode(), digest_size=8).digest(), "big")


def split_of(key: str, valid_fraction: float, seed: int) -> Split:
    """Deterministic split by the hash of `key`; about `valid_fraction` of all keys are held out.

    Equal keys always land in the same split, whatever else is in the data and in whatever order it is read.
    """
    return "valid" if stable_hash("split", str(seed), key) < valid_fraction * 2**64 else "train"
