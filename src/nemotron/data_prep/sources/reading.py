"""How records are read, and an account in which every record is counted: as read, or as skipped for a reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nemo_runspec.errors import UserError, nearest
from nemo_runspec.words import counted

SAMPLES_PER_REASON = 5
FEW_RECORDS = 10  # of fewer, a share means little

# Why the reader skips a record; who consumes the rows may add reasons.
NOT_UTF8 = "not UTF-8"
MALFORMED = "malformed JSON"
MALFORMED_CSV = "malformed CSV row"
NOT_AN_OBJECT = "not a JSON object"
NO_FIELD = "field is missing"
NOT_TEXT = "field is not text"
NO_VALUE = "value of no Python type"
TOO_LONG = "longer than max_record_bytes"
DAMAGED = "damaged file"
UNREADABLE = "unreadable file"
EMPTY = "empty file"
NO_PAGE = "WARC record of another kind"
OTHER_STATUS = "HTTP status other than 200"
OTHER_CONTENT = "neither HTML nor text"
OTHER_ENCODING = "content encoding that is not read"
MALFORMED_HTTP = "malformed HTTP response"
BEYOND_SCALE = "beyond scale"
NOT_ERRORS = (EMPTY, NO_PAGE, OTHER_STATUS, OTHER_CONTENT, OTHER_ENCODING, MALFORMED_HTTP, BEYOND_SCALE)
"""Reasons that are counted under either policy and never stop the reading: they are normal in crawls and folders, or
asked for."""


class DamagedError(Exception):
    """The bytes of a file, or of the rest of it, are not what its format asks for.

    `read`: stored bytes up to there, or some more, since they are read ahead; None where that is not known.
    """

    read: int | None = None


class Row(NamedTuple):
    """One record. `index`: its number in the piece, from 0; skipped records are counted as well."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    value: dict[str, Any]


class BadRecordError(UserError):
    """A record, or a file, that cannot be read, and that `on_error: skip` would leave out."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that is skipped, or `count` of them from `index` on. `index` None: what is wrong is the file."""

    index: int | None
    reason: str
    detail: str = ""
    hint: str | None = None
    count: int = 1


def lacking(wanted: str, field: str, names: Sequence[str], problem: str = "is missing") -> Bad:
    """A record without the field that is to hold what is `wanted`, or where it is not text; names the nearest."""
    guess = nearest(field, [name for name in names if name != field]) if problem == "is missing" else None
    meant = f", did you mean {guess!r}?" if guess else ""
    reason = NOT_TEXT if problem == "is not text" else NO_FIELD
    hint = f"fields there: {', '.join(names)}; a source's `columns: {{{wanted}: {guess or 'FIELD'}}}` takes another one"
    return Bad(None, reason, f"field {field!r} {problem}{meant}", hint)


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read.

    `on_error`: `stop` at the first record or file that cannot be read, with a UserError that names it; or `skip` and
    count it. `max_record_bytes`: longer records are never held in memory. `columns`: name in the row -> name in the
    file, with dots for nested fields; where there are any, a row has these names only, as far as the record has them
    (rows of text files and WARC keep their own names). `required`: fields that a row must have, as text. `present`:
    fields that a row must have, not null. `rest`: a row has the record's other fields, too, under their own names.
    `share`: of the records, those that `in_share` takes with `seed`, under `skip` of those that cannot be read as well;
    the others are counted as beyond scale.
    """

    on_error: Literal["stop", "skip"] = "stop"
    max_record_bytes: int = 32 * 2**20
    columns: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ("text",)
    present: tuple[str, ...] = ()
    rest: bool = False
    share: float = 1.0
    seed: int = 0

    @property
    def names(self) -> dict[str, str] | None:
        """Name in a row -> name in the file, for all that is wanted; None for everything there is."""
        if not self.columns or self.rest:
            return None
        return {**{name: name for name in (*self.required, *self.present)}, **self.columns}


@dataclass
class ReadReport:
    """What was read and what was skipped.

    `records`: that became rows. `skipped`: reason -> records, or pieces of files
    where the reason is the file's. `samples`: the first few of each reason, as `{"where", "reason"}`. `unread_bytes`:
    stored bytes of the pieces that are unreadable, or behind what is damaged.
    """

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    samples: list[dict[str, str]] = field(default_factory=list)
    unread_bytes: int = 0

    def skip(self, reason: str, where: str, detail: str = "", count: int = 1) -> None:
        """Count what was skipped; `reason` is one of few, `detail` is shown with the samples."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        if self.has_room(reason):
            self.samples.append({"where": where, "reason": f"{reason}: {detail}" if detail else reason})

    def add(self, other: ReadReport) -> None:
        """Add the account of another piece."""
        self.records += other.records
        self.unread_bytes += other.unread_bytes
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
            room = SAMPLES_PER_REASON - len(self.samples_of(reason))
            self.samples += other.samples_of(reason)[:room]

    def pass_over(self, count: int = 1) -> None:
        """Count records that are beyond the share that was asked for."""
        if count:
            self.skipped[BEYOND_SCALE] = self.skipped.get(BEYOND_SCALE, 0) + count

    def has_room(self, reason: str) -> bool:
        """Whether one more sample of a reason would be kept: its place may be expensive to find."""
        return len(self.samples_of(reason)) < SAMPLES_PER_REASON

    def samples_of(self, reason: str) -> list[dict[str, str]]:
        """The samples of one reason."""
        return [sample for sample in self.samples if _is_of(sample, reason)]

    def errors(self) -> dict[str, int]:
        """The part of `skipped` that would have stopped the reading under `stop`."""
        return {reason: count for reason, count in self.skipped.items() if reason not in NOT_ERRORS}

    def __str__(self) -> str:
        """The counts for people, one line."""
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{counted(self.records, 'record')} read" + (f"; not read: {skipped}" if skipped else "")


def places(samples: Sequence[Mapping[str, str]]) -> str:
    """Where the first few of some samples are from, for people."""
    return ", ".join(sample["where"] for sample in samples[:3])


def check_skipped(
    source: str,
    records: int,
    errors: Mapping[str, int],
    samples: Sequence[Mapping[str, str]],
    max_skipped: float,
    unread: float = 0.0,
) -> None:
    """UserError if none of a source's records could be read, or more than a share of `max_skipped` could not.

    `records`: all of them, skipped ones included; `errors`: reason -> how many. A damaged file is one of them, however
    many it holds: `unread`, the share of the source's stored bytes that could not be read, is held to `max_skipped`,
    too. Of fewer than `FEW_RECORDS` records a share says nothing.
    """
    skipped = sum(errors.values())
    none_left = skipped >= records
    too_many = skipped > max_skipped * records or unread > max_skipped
    if not skipped or not (none_left or (too_many and records >= FEW_RECORDS)):
        return
    reason = max(sorted(errors), key=lambda name: errors[name])
    example = next((f", as {sample['where']}: {sample['reason']}" for sample in samples if _is_of(sample, reason)), "")
    example = example.replace(f": {reason}: ", ": ", 1)  # it was named
    limit = "" if none_left else f", more than reading.max_skipped = {max_skipped:g} allows"
    share = f", with {unread:.1%} of its bytes" if unread else ""
    hints = ["where the field has another name, say so in the source's `columns`"] * (reason in (NO_FIELD, NOT_TEXT))
    hints += ["reading.max_skipped=1 allows any number"] * (not none_left)
    raise UserError(
        f"source {source!r}: {skipped:,} of {records:,} records cannot be read{share}{limit}; {errors[reason]:,} times "
        f"{reason}{example}",
        "; ".join(hints) or None,
    )


def check_scale(source: str, scale: str | None, *, records: int, beyond: int) -> None:
    """Say on stderr how many of a source's `records` were taken; `beyond` of them were not. `scale` None: all were.

    UserError if none was taken.
    """
    if scale is None:
        return
    if records and beyond == records:
        raise UserError(
            f"source {source!r}: none of its {records:,} records is within --scale {scale}", "a larger scale takes more"
        )
    print(f"source {source!r}: {records - beyond:,} of {records:,} records taken (--scale {scale})", file=sys.stderr)


def check_kept(
    source: str,
    *,
    read: int,
    kept: int,
    dropped: Mapping[str, int],
    remedies: Mapping[str, str] | None = None,
    unit: str = "read",
) -> None:
    """Refuse a source of the user's of which nothing is left; say on stderr where most of it was dropped, and why.

    Args:
        read: its records. None is no reason to refuse it: who reads says that a source is empty.
        kept: what was made of them.
        dropped: reason -> records that were dropped for it.
        remedies: reason -> what to set or to change, for people.
        unit: what `read`, `kept` and `dropped` count, for people, where these are not the records read.

    Raises:
        UserError: all of its records were dropped.
    """
    total = sum(dropped.values())
    if not total or (kept and 2 * total <= read):
        return
    ranked = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ranked if count)
    advice = "; ".join((remedies or {})[reason] for reason, count in ranked if count and reason in (remedies or {}))
    if not kept:
        raise UserError(f"source {source!r}: nothing is left of {read:,} {unit}: {reasons}", advice or None)
    print(f"warning: source {source!r}: {total:,} of {read:,} {unit} are dropped: {reasons}", file=sys.stderr)
    if advice:
        print(f"  {advice}", file=sys.stderr)


def _is_of(sample: Mapping[str, str], reason: str) -> bool:
    return sample["reason"] == reason or sample["reason"].startswith(f"{reason}: ")
