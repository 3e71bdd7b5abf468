"""Which source the next training sequence comes from: weights that really mix, in phases.

`blend.json`, as data preparation writes it beside the token files:
`{"phases": [{"name", "until": 0.94, "weights": {source: w}}, ...],
  "sources": {source: {"train": ["x/train-00000", ...], "valid": [...], "tokens": n, ...}},
  "vocab_size": n}`
`until` is the share of all training tokens at which a phase ends; file names are prefixes relative to the file, and
those of one list are one stream after another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError


@dataclass(frozen=True)
class Phase:
    """One stretch of training: ends at the share `until` of all tokens; `weights` need not sum to 1."""

    name: str
    until: float
    weights: dict[str, float]


@dataclass(frozen=True)
class Source:
    """Prefixes of the training and held-out token files (none: no such part), and the number of training tokens."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    tokens: int


@dataclass(frozen=True)
class BlendFile:
    """A validated blend.json."""

    phases: tuple[Phase, ...]
    sources: dict[str, Source]
    vocab_size: int

    def only(self, phase: str) -> tuple[Phase, ...]:
        """The phases of a run that draws from the one of this name alone. UserError for an unknown name."""
        found = [replace(each, until=1.0) for each in self.phases if each.name == phase]
        if not found:
            names = ", ".join(each.name for each in self.phases)
            raise UserError(f"the blend has no phase {phase!r}", f"it has {names}")
        return tuple(found)


def is_short_step(step: int, share: float) -> bool:
    """Whether step `step`, counted from 0, has short sequences where `share` of all steps have.

    The first n steps have n x share of them, rounded down: 0.5 is every other step, 0.08 every twelfth or thirteenth.
    A function of the step alone, so a resumed run goes on with the same order, and all ranks agree.
    """
    return math.floor((step + 1) * share + 1e-9) > math.floor(step * share + 1e-9)  # 25 x 0.08 is 2, not 1.99...


def read_blend(directory: Path) -> BlendFile:
    """Read and check `directory`/blend.json. Raises UserError naming the file and what is wrong in it."""
    path = Path(directory) / "blend.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        sources = {
            name: Source(_prefixes(entry["train"]), _prefixes(entry.get("valid", [])), int(entry["tokens"]))
            for name, entry in raw["sources"].items()
        }
        phases = tuple(
            Phase(str(p["name"]), float(p["until"]), {s: float(w) for s, w in p["weights"].items()})
            for p in raw["phases"]
        )
        vocab_size = int(raw["vocab_size"])
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; is this the output of a pretraining data prep?") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: malformed blend ({type(error).__name__}: {error})") from error
    _check_phases(path, phases, sources)
    return BlendFile(phases, sources, vocab_size)


def _prefixes(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(prefix, str) for prefix in value):
        raise TypeError(f"{value!r} is not a list of prefixes")
    return tuple(value)


def _check_phases(path: Path, phases: tuple[Phase, ...], sources: dict[str, Source]) -> None:
    ends = [phase.until for phase in phases]
    if not ends or ends[-1] != 1.0 or any(a >= b for a, b in zip([0.0, *ends], ends, strict=False)):
        raise UserError(f"{path}: phases must end at growing shares up to 1.0, not at {ends}")
    for phase in phases:
        for source, weight in phase.weights.items():
            if source not in sources:
                raise UserError(f"{path}: phase {phase.name!r} weighs source {source!r}, not one of the sources")
            if not 0.0 <= weight < float("inf"):
                raise UserError(f"{path}: phase {phase.name!r}: weight {weight} of {source!r} is not 0 or more")
            if weight > 0 and not sources[source].train:
                raise UserError(f"{path}: phase {phase.name!r} weighs source {source!r}, which has no training tokens")
        if not sum(phase.weights.values()) > 0:
            raise UserError(f"{path}: phase {phase.name!r} has no source with a weight above 0")


@dataclass(frozen=True)
class MixtureRow:
    """One source within one phase: the share asked for, the share drawn, and how much that was."""

    phase: str
    source: str
    requested: float
    realised: float
    sequences: int
    tokens: int


class Blend:
    """Draws a source for each of `total_sequences` sequences.

    Within a phase, after any n draws, each source has been drawn n*w times to within less than one sequence: the
    quota method of Tijdeman, "The chairman assignment problem" (1980). Drawing at random would miss by about the
    square root of n, and the plain "most behind first" rule can fall behind by more than one among many sources.
    """

    def __init__(self, phases: tuple[Phase, ...], total_sequences: int) -> None:
        if total_sequences < 1:
            raise ValueError(f"total_sequences is {total_sequences}, must be at least 1")
        self.phases = phases
        self._ends = [round(phase.until * total_sequences) for phase in phases]
        self._weights: list[dict[str, float]] = []
        for phase in phases:
            total = sum(phase.weights.values())
            self._weights.append({s: w / total for s, w in sorted(phase.weights.items()) if w > 0})
        self._drawn: list[dict[str, int]] = [dict.fromkeys(weights, 0) for weights in self._weights]
        self._count = 0

    @property
    def phase(self) -> str:
        """Name of the phase that the next draw belongs to; the last phase once all sequences are drawn."""
        return self.phases[self._phase_index()].name

    def draw(self) -> str:
        """The source of the next sequence. Past `total_sequences` the last phase goes on."""
        index = self._phase_index()
        weights, drawn = self._weights[index], self._drawn[index]
        n = sum(drawn.values()) + 1
        margin = 1.0 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0
        # Eligible: far enough behind that one more does not put it a whole sequence ahead. Among those, the one that
        # would be the first to fall a whole sequence behind. The tolerance absorbs rounding in n*w.
        eligible = [s for s, w in weights.items() if w * n - drawn[s] >= margin - 1e-9]
        chosen = min(eligible, key=lambda s: (drawn[s] + 1 - margin) / weights[s])
        drawn[chosen] += 1
        self._count += 1
        return chosen

    def realised(self, seq_len: int) -> list[MixtureRow]:
        """What was drawn so far, a row for each phase and source."""
        rows = []
        for phase, weights, drawn in zip(self.phases, self._weights, self._drawn, strict=True):
            total = sum(drawn.values())
            for source, weight in weights.items():
                n = drawn[source]
                rows.append(MixtureRow(phase.name, source, weight, n / total if total else 0.0, n, n * seq_len))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Draws so far, by phase: JSON-able."""
        return {"count": self._count, "drawn": [dict(drawn) for drawn in self._drawn]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises UserError if that was of other phases or sources."""
        drawn = [{source: int(n) for source, n in phase.items()} for phase in state["drawn"]]
        if [set(phase) for phase in drawn] != [set(phase) for phase in self._drawn]:
            raise UserError("the checkpoint's data cursor is of another blend")
        self._count, self._drawn = int(state["count"]), drawn

    def _phase_index(self) -> int:
        return next((i for i, end in enumerate(self._ends) if self._count < end), len(self._ends) - 1)
