"""What a blend asks for, and what the loader will really draw: sequences, tokens and epochs of every source and phase.

The loader draws whole sequences by a quota rule (`Blend` of the training stack; Tijdeman, "The chairman assignment
problem", 1980): within a phase, after any number of draws, every source has been drawn its share of them to within less
than one sequence. So the realised mixture follows from the requested one without drawing: of n sequences and a share w,
the loader takes the integer below or above n*w. `plan_mixture` gives one of the two for every source, such that they
add up to n; the loader's own count may be the other one, and differs by at most one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.planning import share_out
from nemotron.data_prep.tokens.blend import Phase, average_weights, resolve_phases
from nemotron.kit.tables import aligned

MIXTURE_FILE = "mixture.json"
# Muennighoff et al., "Scaling Data-Constrained Language Models", 2023 (arXiv 2305.16264).
GOOD_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class SourceTokens:
    """What there is of a source to train on, after its caps. `repeats`: epochs of it at most; None: no limit."""

    documents: int
    tokens: int
    repeats: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One source in one phase. Shares are of the phase's tokens; `epochs` counts passes over the whole source."""

    phase: str
    source: str
    requested: float
    realised: float
    sequences: int
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source over the whole training. `documents` and `tokens` are what there is, `drawn` the tokens trained on."""

    source: str
    documents: int
    tokens: int
    requested: float
    realised: float
    drawn: int
    epochs: float
    repeats: float | None


@dataclass(frozen=True, slots=True)
class Mixture:
    """The plan. `phases` goes into blend.json: normalised weights. `train_tokens` counts whole sequences.

    `budget_given`: else `train_tokens` is what the sources hold, each times its repeats. `one_pass`: that is every
    source once, since the weights are those of the sources' sizes.
    `largest_train_tokens`: with more than these tokens, `limited_by` would need more epochs than its repeats; None
    where no source has a limit.
    """

    phases: list[Phase]
    train_tokens: int
    seq_length: int
    budget_given: bool
    one_pass: bool
    largest_train_tokens: int | None
    limited_by: str | None
    sources: list[SourceRow]
    rows: list[PhaseRow]

    def to_json(self) -> dict[str, Any]:
        """As written to mixture.json and into the artifact's record."""
        return asdict(self)

    def table(self) -> str:
        """The sources as lines of text: what there is, what is asked for, what is drawn."""
        head = ("source", "train documents", "train tokens", "asked", "drawn", "epochs")
        body = [
            (
                row.source,
                f"{row.documents:,}",
                f"{row.tokens:,}",
                f"{row.requested:.2%}",
                f"{row.realised:.2%}",
                f"{row.epochs:.2f}",
            )
            for row in self.sources
        ]
        lines = aligned([head, *body], "<>>>>>")
        # Once all tokens that there are, and yet drawn by weight: a small source often, a large one in part.
        what = "train_tokens" if self.budget_given else "one pass" if self.one_pass else "as many as the sources hold"
        none = "" if self.train_tokens else ": there are fewer"
        lines.append(f"{what}: {self.train_tokens:,} tokens in sequences of {self.seq_length:,}{none}")
        if self.train_tokens and any(abs(row.realised - row.requested) > row.requested / 10 for row in self.sources):
            lines.append(
                f"only whole sequences of {self.seq_length:,} are drawn: what is asked of the smallest is rounded"
            )
        if self.largest_train_tokens is not None:
            lines.append(f"largest train_tokens by repeats: {self.largest_train_tokens:,} (source {self.limited_by})")
        return "\n".join(lines)

    def repetitions(self) -> list[str]:
        """One line for people where sources are drawn more than `GOOD_EPOCHS` times and no `repeats` says that this
        is wanted."""
        often = [row for row in self.sources if row.epochs > GOOD_EPOCHS and row.repeats is None]
        if not often:
            return []
        worst = max(often, key=lambda row: row.epochs)
        more = f" (and {len(often) - 1} more of them often)" if len(often) > 1 else ""
        least = min(math.floor(row.tokens / row.requested) for row in self.sources if row.requested)
        without = (
            f"train_tokens of at most {least:,} repeats none" if least > self.seq_length else "give it less weight"
        )
        drawn = f"source {worst.source!r} is drawn {worst.epochs:.1f} times{more}"
        return [f"{drawn}; {GOOD_EPOCHS} epochs are nearly as good as new data (arXiv 2305.16264); {without}"]


def plan_mixture(
    sources: Mapping[str, SourceTokens],
    phases: Sequence[Phase] | None,
    *,
    seq_length: int,
    train_tokens: int | None = None,
) -> Mixture:
    """Requested and realised mixture of a blend.

    Args:
        sources: what there is to train on, by name; sources that are held out altogether are not among them.
        phases: weights as the config has them; None: in proportion to tokens x repeats.
        seq_length: tokens of a sequence, the unit of drawing.
        train_tokens: what the model is to be trained on; None: what the sources hold, each times its repeats.

    Raises:
        UserError: phases and sources do not fit (`resolve_phases`); a source with a weight has no tokens, or, where
            `train_tokens` is given, fewer than one sequence and its label; the blend needs more epochs of a source than
            its repeats; `train_tokens` leaves a phase without a sequence.
    """
    if phases is None:
        weights = {name: source.tokens * (source.repeats or 1.0) for name, source in sources.items()}
        if not any(weights.values()):
            raise UserError("no source has a training token", f"sources: {', '.join(sources) or 'none'}")
        phases = [{"name": "all", "until": 1.0, "weights": weights}]
    resolved = resolve_phases(phases, sources)
    used = [name for name in sources if any(phase["weights"][name] > 0 for phase in resolved)]
    for name in used:
        least = seq_length + 1 if train_tokens is not None else 1  # a sequence, and the label of its last token
        if sources[name].tokens < least:
            raise UserError(
                f"source {name!r} has a weight and {sources[name].tokens:,} training tokens; it takes {least:,}",
                "give it more documents, hold out less of it, give it weight 0, or make seq_length smaller",
            )
    budget = train_tokens or round(sum(sources[name].tokens * (sources[name].repeats or 1.0) for name in used))
    lengths = _phase_lengths(resolved, budget // seq_length)
    if train_tokens is not None and min(lengths) < 1:
        phase = resolved[lengths.index(min(lengths))]
        raise UserError(
            f"train_tokens = {train_tokens:,} is {budget // seq_length:,} sequences of {seq_length:,}; "
            f"phase {phase['name']!r} is left with none"
        )
    if train_tokens is not None:
        _check_repeats(sources, used, resolved, lengths, seq_length)

    rows: list[PhaseRow] = []
    for phase, length in zip(resolved, lengths, strict=True):
        weights = phase["weights"]
        names = sorted(weights)  # equal remainders go by name, whatever the order in the config
        counts = dict(zip(names, share_out(length, [weights[name] for name in names]), strict=True))
        for name in used:
            requested, count = weights[name], counts[name]
            # What the loader's quota rule promises of its own count holds for this one.
            assert abs(count - requested * length) < 1 + 1e-12 * length, (phase["name"], name, count, requested, length)
            rows.append(
                PhaseRow(
                    phase=phase["name"],
                    source=name,
                    requested=requested,
                    realised=count / length if length else 0.0,
                    sequences=count,
                    tokens=count * seq_length,
                    epochs=count * seq_length / sources[name].tokens,
                )
            )
    total = max(sum(lengths), 1)
    # Of a pass that is shorter than a sequence, the shares of the phases as they are stated.
    ends = [0.0, *(phase["until"] for phase in resolved)]
    spans = [n / total for n in lengths] if any(lengths) else [end - begin for begin, end in itertools.pairwise(ends)]
    shares = {name: sum(p["weights"][name] * n for p, n in zip(resolved, spans, strict=True)) for name in used}
    source_rows = []
    for name in sources:
        drawn = sum(row.tokens for row in rows if row.source == name)
        source_rows.append(
            SourceRow(
                source=name,
                documents=sources[name].documents,
                tokens=sources[name].tokens,
                requested=shares.get(name, 0.0),
                realised=drawn / (total * seq_length),
                drawn=drawn,
                epochs=drawn / sources[name].tokens if sources[name].tokens else 0.0,
                repeats=sources[name].repeats,
            )
        )
    largest, limited_by = _largest_budget(sources, resolved)
    return Mixture(
        phases=resolved,
        train_tokens=sum(lengths) * seq_length,
        seq_length=seq_length,
        budget_given=train_tokens is not None,
        one_pass=train_tokens is None and _is_one_pass(source_rows),
        largest_train_tokens=largest,
        limited_by=limited_by,
        sources=source_rows,
        rows=rows,
    )


def _is_one_pass(rows: Sequence[SourceRow]) -> bool:
    """Whether every source that is drawn is asked for in proportion to its tokens, to a hundredth, and once."""
    used = [row for row in rows if row.requested]
    total = sum(row.tokens for row in used)
    return all(
        math.isclose(row.requested * total, row.tokens, rel_tol=0.01) and row.repeats in (None, 1) for row in used
    )


def _phase_lengths(phases: Sequence[Phase], sequences: int) -> list[int]:
    """Sequences of each phase; ends are rounded as the loader rounds them."""
    ends = [0] + [round(phase["until"] * sequences) for phase in phases]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _check_repeats(
    sources: Mapping[str, SourceTokens],
    used: Sequence[str],
    phases: Sequence[Phase],
    lengths: Sequence[int],
    seq_length: int,
) -> None:
    """UserError naming a source that the blend would repeat too often; one sequence a phase is allowed for rounding."""
    too_often = []
    for name in used:
        source = sources[name]
        requested = sum(p["weights"][name] * n for p, n in zip(phases, lengths, strict=True)) * seq_length
        if source.repeats is not None and requested > source.repeats * source.tokens + len(phases) * seq_length:
            too_often.append(
                f"source {name!r}: {requested:,.0f} of {source.tokens:,} tokens are "
                f"{requested / source.tokens:.2f} epochs, repeats is {source.repeats:g}"
            )
    if too_often:
        largest, limited_by = _largest_budget(sources, phases)
        more = f" (and {len(too_often) - 1} more)" if len(too_often) > 1 else ""
        raise UserError(
            f"{too_often[0]}{more}",
            f"train_tokens of at most {largest:,} fit (limited by {limited_by!r}); or less weight, or more repeats",
        )


def _largest_budget(sources: Mapping[str, SourceTokens], phases: Sequence[Phase]) -> tuple[int | None, str | None]:
    """The most tokens that can be trained on within all repeats, and the source that says so."""
    shares = average_weights(phases)
    limits = {
        name: math.floor(source.repeats * source.tokens / shares[name])
        for name, source in sources.items()
        if source.repeats is not None and shares[name] > 0
    }
    if not limits:
        return None, None
    name = min(limits, key=lambda name: limits[name])
    return limits[name], name
