"""How records are read, and the account of what was read and what was not: every record is in one of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nemo_runspec.errors import UserError, nearest

SAMPLES_PER_REASON = 5
FEW_RECORDS = 10  # of so few a share says nothing

# Reasons of a skip that are the reader's own; others are for the consumers of rows to add.
NOT_UTF8 = "not UTF-8"
MALFORMED = "malformed JSON"
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
NOT_ERRORS = (EMPTY, NO_PAGE, OTHER_STATUS, OTHER_CONTENT, OTHER_ENCODING, MALFORMED_HTTP)
"""Reasons that are counted and stop nothing under either policy: every crawl and many a folder holds such."""


class Row(NamedTuple):
    """One record. `index`: its place in the piece, from 0; what is skipped has a place, too."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that is not given out, or `count` of them from `index` on. `index` None: it concerns the file."""

    index: int | None
    reason: str
    detail: str = ""
    hint: str | None = None
    count: int = 1


def lacking(field: str, names: Sequence[str], problem: str = "is missing") -> Bad:
    """A field that is not there, or not text, with the nearest that is there."""
    guess = nearest(field, [name for name in names if name != field]) if problem == "is missing" else None
    meant = f", did you mean {guess!r}?" if guess else ""
    reason = NOT_TEXT if problem == "is not text" else NO_FIELD
    return Bad(None, reason, f"field {field!r} {problem}{meant}", f"fields there: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read.

    `on_error`: `stop` at the first record or file that is not right, with a UserError that names it; or `skip` and
    count it. `max_record_bytes`: no longer record is held in memory. `columns`: wanted name -> name in the file, dots
    for nested fields; given, a row has these names only, and the ones it lacks are left out (text files and WARC have
    names of their own and are not renamed). `required`: names of a row that must be there and text. `present`: names
    that must be there and not null.
    """

    on_error: Literal["stop", "skip"] = "stop"
    max_record_bytes: int = 32 * 2**20
    columns: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ("text",)
    present: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str] | None:
        """Name in a row -> name in the file, for all that is wanted; None for everything there is."""
        if not self.columns:
            return None
        return {**{name: name for name in (*self.required, *self.present)}, **self.columns}


@dataclass
class ReadReport:
    """What was read and what was not.

    `records` were given out; `bytes` of files, as stored, were read for them. `skipped`: reason -> records, or pieces
    of a file for what concerns a file. `samples` of each reason: `{"where", "reason"}`, the first few.
    """

    records: int = 0
    bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    samples: list[dict[str, str]] = field(default_factory=list)

    def skip(self, reason: str, where: str, detail: str = "", count: int = 1) -> None:
        """Count what was skipped; `reason` is one of few, `detail` is shown with the samples."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        if self.has_room(reason):
            self.samples.append({"where": where, "reason": f"{reason}: {detail}" if detail else reason})

    def add(self, other: ReadReport) -> None:
        """Take in the account of another piece."""
        self.records += other.records
        self.bytes += other.bytes
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
            room = SAMPLES_PER_REASON - len(self.samples_of(reason))
            self.samples += other.samples_of(reason)[:room]

    def has_room(self, reason: str) -> bool:
        """Whether one more sample of a reason would be kept: finding out where it is may cost something."""
        return len(self.samples_of(reason)) < SAMPLES_PER_REASON

    def samples_of(self, reason: str) -> list[dict[str, str]]:
        """The samples of one reason."""
        return [sample for sample in self.samples if _is_of(sample, reason)]

    def errors(self) -> dict[str, int]:
        """Of `skipped`, what would have stopped the reading under `stop`."""
        return {reason: count for reason, count in self.skipped.items() if reason not in NOT_ERRORS}

    def __str__(self) -> str:
        """The counts for people, one line."""
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{self.records} records read" + (f"; not read: {skipped}" if skipped else "")


def check_skipped(
    source: str, records: int, errors: Mapping[str, int], samples: Sequence[Mapping[str, str]], max_skipped: float
) -> None:
    """UserError if too many records of a source were left out because they could not be read.

    `records`: all of them, those left out included; `errors`: reason -> how many. Of fewer than `FEW_RECORDS` a share
    says nothing: there it is an error if none is left.
    """
    skipped = sum(errors.values())
    if not skipped or skipped <= max_skipped * records or (records < FEW_RECORDS and skipped < records):
        return
    reason = max(sorted(errors), key=lambda name: errors[name])
    example = next((f", as {sample['where']}: {sample['reason']}" for sample in samples if _is_of(sample, reason)), "")
    example = example.replace(f": {reason}: ", ": ", 1)  # it was named
    key = (
        "where the field has another name, say so in the source's `columns`; " if reason in (NO_FIELD, NOT_TEXT) else ""
    )
    raise UserError(
        f"source {source!r}: {skipped:,} of {records:,} records cannot be read, more than reading.max_skipped = "
        f"{max_skipped:g} allows; {errors[reason]:,} times {reason}{example}",
        f"{key}reading.max_skipped=1 allows any number",
    )


def _is_of(sample: Mapping[str, str], reason: str) -> bool:
    return sample["reason"] == reason or sample["reason"].startswith(f"{reason}: ")
