"""Tokenise a curated corpus into one Megatron stream per source and split, and write down how to mix them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.curation.corpus import Corpus
from nemotron.data_prep.sources.documents import Document
from nemotron.data_prep.tokens.blend_file import BLEND_FILE, Blend, Phase, SourceFiles, empty_source, write_blend_file
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter, token_dtype
from nemotron.data_prep.tokens.tokenizer import EOS_ID, encode_plain, tokenizer_from
from nemotron.data_prep.work.engines import Engine, SerialEngine

__all__ = [
    "BLEND_FILE",
    "Blend",
    "Phase",
    "SourceFiles",
    "add_shares",
    "average_weights",
    "check_documents",
    "resolve_phases",
    "sample_texts",
    "write_blend",
]

_BATCH = 256  # documents a task


def resolve_phases(phases: Sequence[Phase], sources: Iterable[str]) -> list[Phase]:
    """Check the phases against the sources there are, and normalise the weights of each to sum 1.

    A weight of 0 leaves a source out. UserError: a weight for a source that does not exist (nearest name), a source
    that no phase mentions, a negative weight, phases that do not rise to 1.0.
    """
    names = sorted(sources)
    if not phases or [p["until"] for p in phases] != sorted({p["until"] for p in phases}) or phases[-1]["until"] != 1.0:
        raise UserError("blend.phases: `until` must rise from phase to phase and end at 1.0")
    resolved: list[Phase] = []
    for phase in phases:
        for name, weight in phase["weights"].items():
            if name not in names:
                guess = nearest(name, names)
                raise UserError(
                    f"blend phase {phase['name']!r}: no source named {name!r}"
                    + (f", did you mean {guess!r}?" if guess else ""),
                    f"sources with documents are {', '.join(names) or 'none'}",
                )
            if weight < 0:
                raise UserError(f"blend phase {phase['name']!r}: weight of {name!r} is {weight}, must be 0 or more")
        total = sum(phase["weights"].values())
        if total <= 0:
            raise UserError(f"blend phase {phase['name']!r}: all weights are 0")
        weights = {name: phase["weights"].get(name, 0.0) / total for name in names}
        resolved.append({"name": phase["name"], "until": phase["until"], "weights": weights})
    for name in names:
        if all(
            phase["weights"][name] == 0 and name not in given["weights"]
            for phase, given in zip(resolved, phases, strict=True)
        ):
            raise UserError(
                f"source {name!r} has no weight in any phase of the blend",
                f"set blend.phases.N.weights.{name} (0 leaves it out)",
            )
    return resolved


def add_shares(phases: Sequence[Phase], shares: Mapping[str, float]) -> list[Phase]:
    """Give sources that a phase does not mention a share of all its tokens; the others keep their proportions.

    UserError when the shares exceed 1 together, or leave nothing to a phase that weighs other sources.
    """
    result: list[Phase] = []
    for phase in phases:
        added = {name: share for name, share in shares.items() if name not in phase["weights"]}
        total, given = sum(added.values()), sum(phase["weights"].values())
        if total > 1.0 or (total == 1.0 and given > 0):
            raise UserError(
                f"blend phase {phase['name']!r}: the sources' weights add up to {total:g}, which is too much"
            )
        scale = (1.0 - total) / given if given > 0 else 0.0
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


def check_documents(corpus: Corpus, phases: Sequence[Phase]) -> None:
    """UserError for a source that has a weight but no training document left after curation."""
    alive = {entry.source for entry in corpus.entries if entry.split == "train"}
    for phase in phases:
        for source, weight in phase["weights"].items():
            if weight > 0 and source not in alive:
                raise UserError(
                    f"source {source!r} has a weight in the blend but no training document is left after curation",
                    "the table above says what was dropped and why",
                )


def sample_texts(corpus: Corpus, shares: Mapping[str, float], num_bytes: int) -> Iterator[str]:
    """Training texts for the tokenizer, about `num_bytes` of them, mixed as training will see them.

    A source smaller than its share is taken whole; no text is repeated.
    """
    for source in corpus.sources():
        budget = shares.get(source, 0.0) * num_bytes
        for document in corpus.documents(source, "train"):
            if budget <= 0:
                break
            budget -= len(document.text.encode())
            yield document.text


def write_blend(
    corpus: Corpus, tokenizer: Tokenizer, phases: Sequence[Phase], output_dir: Path, engine: Engine | None = None
) -> Blend:
    """Write `SOURCE_train`, `SOURCE_valid` (.bin/.idx) and blend.json into `output_dir`; return the latter's content.

    `phases` are those of `resolve_phases`. `engine` tokenises (default: this process). Documents end with eos and begin
    with no bos. UserError when a source with a weight has no training document left.
    """
    engine = engine or SerialEngine()
    tokenizer_json = tokenizer.to_str()
    sources = sorted(phases[0]["weights"])
    check_documents(corpus, phases)
    output_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.get_vocab_size()
    files: dict[str, SourceFiles] = {}
    for source in sources:
        streams = {}
        for split in ("train", "valid"):
            prefix = output_dir / f"{source}_{split}"
            streams[split] = _write_stream(corpus.documents(source, split), tokenizer_json, prefix, vocab_size, engine)
        train, valid = streams["train"], streams["valid"]
        files[source] = {
            **empty_source(),
            "train": [f"{source}_train"] * bool(train[0]),
            "valid": [f"{source}_valid"] * bool(valid[0]),
            "tokens": train[1],
            "bytes": train[2],
            "documents": train[0],
            "valid_tokens": valid[1],
            "valid_bytes": valid[2],
            "valid_documents": valid[0],
        }
    blend: Blend = {"phases": list(phases), "sources": files, "vocab_size": vocab_size, "eos_id": EOS_ID}
    write_blend_file(blend, output_dir)
    return blend


def _write_stream(
    documents: Iterable[Document], tokenizer_json: str, prefix: Path, vocab_size: int, engine: Engine
) -> tuple[int, int, int]:
    """Number of documents, tokens and utf-8 bytes written; no file at all for an empty stream."""
    texts = (document.text for document in documents)
    batches = iter(lambda: list(islice(texts, _BATCH)), [])
    first = next(batches, None)
    if first is None:
        return 0, 0, 0
    num_documents = num_tokens = num_bytes = 0
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        for ids, lengths, size in engine.map_ordered(_tokenize, chain([first], batches), tokenizer_json):
            writer.add_documents(ids, lengths)
            num_documents += len(lengths)
            num_tokens += len(ids)
            num_bytes += size
    return num_documents, num_tokens, num_bytes


def _tokenize(texts: list[str], tokenizer_json: str) -> tuple[np.ndarray, list[int], int]:
    """A task: the ids of all texts one after another (int32), how many are each text's (eos included), utf-8 bytes."""
    documents = [[*ids, EOS_ID] for ids in encode_plain(tokenizer_from(tokenizer_json), texts)]
    ids = np.fromiter(chain.from_iterable(documents), dtype=np.int32)
    return ids, [len(document) for document in documents], sum(len(text.encode()) for text in texts)
