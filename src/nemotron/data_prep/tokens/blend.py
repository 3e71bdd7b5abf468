"""What a blend asks for: phases with the weight of every source, checked and normalised; texts in those proportions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.curation.step import StepTable, read_documents
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.tokens.blend_file import Phase


def resolve_phases(phases: Sequence[Phase], sources: Iterable[str]) -> list[Phase]:
    """Check the phases against the sources there are, and normalise the weights of each to sum 1.

    A weight of 0 leaves a source out. UserError: a weight for a source that does not exist (nearest name), a source
    that no phase mentions, a negative weight, phases that do not rise to 1.0.
    """
    names = sorted(sources)
    if not phases or [p["until"] for p in phases] != sorted({p["until"] for p in phases}) or phases[-1]["until"] != 1.0:
        raise UserError("phases of the blend: `until` must rise from phase to phase and end at 1.0")
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

    UserError when the shares exceed 1 together, or leave nothing to a phase that weighs other sources.
    """
    result: list[Phase] = []
    for phase in phases:
        added = {name: share for name, share in shares.items() if name not in phase["weights"]}
        total, others = sum(added.values()), sum(phase["weights"].values())
        if total > 1.0 or (total == 1.0 and others > 0):
            raise UserError(
                f"blend phase {phase['name']!r}: the sources' weights add up to {total:g}, which is too much"
            )
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
