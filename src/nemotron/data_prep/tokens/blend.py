"""The blend of a pretraining: which streams each source has, and how its sources are mixed, phase by phase.

blend.json is the contract with the training loader: phases with the weight of every source, and per source and split
the streams (.bin/.idx prefixes, relative to the file) with their tokens, documents and utf-8 bytes: bits per byte =
loss in nats x tokens / ln 2 / bytes. Weights are fractions of *tokens drawn*, whatever the sizes of the sources: a
small one is repeated, a big one is not finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.curation.step import StepTable, read_documents
from nemotron.data_prep.sources.documents import SPLITS, stable_hash
from nemotron.data_prep.tokens.encoding import plain_tokenizer
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter, token_dtype

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
    source: dict[str, Any] = {split: [] for split in SPLITS}
    source |= {f"{split}{count}": 0 for split in ("", "valid_", "test_") for count in ("tokens", "bytes", "documents")}
    return cast(SourceFiles, source)


def write_blend_file(blend: Blend, directory: Path) -> Path:
    """Write blend.json into `directory`; returns its path."""
    path = directory / BLEND_FILE
    path.write_text(json.dumps(blend, indent=2) + "\n", "utf-8")
    return path


def write_source(
    folder: Path, source: str, texts: Mapping[str, Sequence[str]], tokenizer: Tokenizer, eos_id: int
) -> SourceFiles:
    """Tokenise the texts of one source, by split, into `folder`/SOURCE-SPLIT.bin and .idx: for a source that fits in
    memory (`tokenization.tokenize_sources` takes any, in shards). Every text ends in `eos_id`."""
    written, tokenizer = empty_source(), plain_tokenizer(tokenizer.to_str())
    dtype = token_dtype(tokenizer.get_vocab_size())
    for split, documents in texts.items():
        ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, eos_id] for text in documents]
        if not ids:
            continue
        with IndexedDatasetWriter(folder / f"{source}-{split}", dtype) as writer:
            writer.add_documents(np.concatenate(ids), [len(document) for document in ids])
        counts = {"documents": len(ids), "tokens": sum(map(len, ids)), "bytes": sum(len(t.encode()) for t in documents)}
        prefix = "" if split == "train" else f"{split}_"
        sizes = {prefix + name: count for name, count in counts.items()}
        written = cast(SourceFiles, written | {split: [f"{source}-{split}"]} | sizes)
        print(f"{source:6} {split:6} {counts['documents']:7,} documents {counts['tokens']:9,} tokens", file=sys.stderr)
    return written


def resolve_phases(phases: Sequence[Phase], sources: Iterable[str]) -> list[Phase]:
    """Check the phases against the sources there are, and normalise the weights of each to sum 1.

    A weight of 0 leaves a source out. UserError: a weight for a source that does not exist (nearest name), a source
    that no phase mentions. That `until` rises to 1.0 and no weight is negative is for the config's schema to see.
    """
    names = sorted(sources)
    resolved: list[Phase] = []
    for phase in phases:
        for name in phase["weights"]:
            if name not in names:
                guess = nearest(name, names)
                raise UserError(
                    f"blend phase {phase['name']!r}: no source named {name!r}"
                    + (f", did you mean {guess!r}?" if guess else ""),
                    f"sources with documents are {', '.join(names) or 'none'}",
                )
        total = sum(phase["weights"].values())
        if total <= 0:
            raise UserError(f"blend phase {phase['name']!r}: all weights are 0")
        weights = {name: phase["weights"].get(name, 0.0) / total for name in names}
        resolved.append({"name": phase["name"], "until": phase["until"], "weights": weights})
    for name in names:
        if all(
            phase["weights"][name] == 0 and name not in requested["weights"]
            for phase, requested in zip(resolved, phases, strict=True)
        ):
            raise UserError(
                f"source {name!r} has no weight in any phase of the blend",
                f"give {name} a weight in one of the phases (0 leaves it out)",
            )
    return resolved


def add_shares(phases: Sequence[Phase], shares: Mapping[str, float]) -> list[Phase]:
    """Give sources that a phase does not mention a share of all its tokens; the others keep their proportions.

    The schema of the data preparation sees to it that they leave something to a phase that weighs other sources.
    """
    result: list[Phase] = []
    for phase in phases:
        added = {name: share for name, share in shares.items() if name not in phase["weights"]}
        total, others = sum(added.values()), sum(phase["weights"].values())
        scale = (1.0 - total) / others if others > 0 else 0.0
        weights = {name: weight * scale for name, weight in phase["weights"].items()}
        result.append({"name": phase["name"], "until": phase["until"], "weights": {**weights, **added}})
    return result


def average_weights(phases: Sequence[Phase]) -> dict[str, float]:
    """Share of each source over the whole training: phase weights averaged by the length of the phases."""
    shares: dict[str, float] = {}
    begin = 0.0
    for phase in phases:
        for name, weight in phase["weights"].items():
            shares[name] = shares.get(name, 0.0) + weight * (phase["until"] - begin)
        begin = phase["until"]
    return shares


def sample_texts(
    files: Sequence[Path], tables: Mapping[str, StepTable], shares: Mapping[str, float], num_bytes: int, seed: int
) -> Iterator[str]:
    """Training texts for the tokenizer, about `num_bytes` of them in all, mixed as training will see them.

    A text is taken or not by its hash. A source smaller than its share is taken whole; no text is repeated.

    Args:
        files: document shards.
        tables: by source, of what these hold.
        shares: of the bytes, by source.
    """
    taken = {
        source: shares.get(source, 0.0) * num_bytes / max(1, table.kept.bytes) * 2**64
        for source, table in tables.items()
    }
    for path in files:
        for document in read_documents(path):
            draw = stable_hash("sample", str(seed), document["text"])
            if document["split"] == "train" and draw < taken[document["source"]]:
                yield document["text"]
