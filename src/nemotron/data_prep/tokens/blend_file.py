"""blend.json, the contract with the training loader: where each source's token streams lie, and how they are mixed.

Phases with the weight of every source, and per source and split the streams (.bin/.idx prefixes, relative to the file)
with their tokens, documents and utf-8 bytes: bits per byte = loss in nats x tokens / ln 2 / bytes. Weights are
fractions of *tokens drawn*, whatever the sizes of the sources: a small one is repeated, a big one is not finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict, cast

BLEND_FILE = "blend.json"


class Phase(TypedDict):
    """One phase of the blend: ends at the fraction `until` of all training tokens; weights sum to 1."""

    name: str
    until: float
    weights: dict[str, float]


class SourceFiles(TypedDict):
    """Streams of one source. `train`, `valid`, `test`: prefixes in order, none for a split without documents.

    `tokens`, `bytes` and `documents` are those to train on. Tokens include what stands around each document (eos),
    bytes do not.
    """

    train: list[str]
    valid: list[str]
    test: list[str]
    tokens: int
    bytes: int
    documents: int
    valid_tokens: int
    valid_bytes: int
    valid_documents: int
    test_tokens: int
    test_bytes: int
    test_documents: int


class Blend(TypedDict):
    """Content of blend.json. `eos_id`: what ends a document; None where nothing does."""

    phases: list[Phase]
    sources: dict[str, SourceFiles]
    vocab_size: int
    eos_id: int | None


def empty_source() -> SourceFiles:
    """A source without a document."""
    source: dict[str, Any] = {split: [] for split in ("train", "valid", "test")}
    source |= {f"{split}{count}": 0 for split in ("", "valid_", "test_") for count in ("tokens", "bytes", "documents")}
    return cast(SourceFiles, source)


def write_blend_file(blend: Blend, directory: Path) -> Path:
    """Write blend.json into `directory`; returns its path."""
    path = directory / BLEND_FILE
    path.write_text(json.dumps(blend, indent=2) + "\n", "utf-8")
    return path
