"""The user's own documents: a named source of files, read in parts that any process can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.documents import Document, Kind, Part, Skipped, split_of
from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.pieces import can_be_cut, pieces_of, whole
from nemotron.data_prep.sources.reader import read_piece, row_id
from nemotron.data_prep.sources.reading import Reading, ReadReport, Row

if TYPE_CHECKING:
    from nemotron.data_prep.curation.step import Drop

_PIECE_BYTES = 4 << 20  # of a part: a worker holds all its documents, judged, and a few parts wait for their turn
_LARGE_BYTES = 8 << 20  # what cannot be cut and is larger is read here, as a stream
_BATCH_CHARS = 1 << 20  # of it, handed out at a time
SKIP_HINT = "on_error: skip leaves such out and counts them"


@dataclass(frozen=True, slots=True)
class UserSource:
    """A named source of the user's documents.

    `paths`: files, globs (`**` included), folders and addresses. `text_field`: column of JSONL, Parquet and Arrow
    files, dots for nested ones. `valid_fraction`: share held out, by hash of the text. `max_documents`: use at most so
    many, in the order of sorted paths. `on_error`: stop at the first record that cannot be read, or skip and count it.
    """

    name: str
    paths: tuple[str, ...]
    kind: Kind = "prose"
    text_field: str = "text"
    valid_fraction: float = 0.02
    max_documents: int | None = None
    on_error: Literal["stop", "skip"] = "stop"

    def files(self) -> list[SourceFile]:
        """Its files, sorted. UserError: there is none, or one that cannot be read was named."""
        return list_files(self.paths, on_error=self.on_error)


def user_documents(source: UserSource, files: Sequence[SourceFile], seed: int) -> Iterator[Part | Skipped]:
    """Documents of a user's source, mostly as parts that are yet to be read; what is skipped is among them.

    UserError, where a part is read: a record that is not right, under `stop`.
    """
    for file in files:
        if file.size <= _LARGE_BYTES or can_be_cut(file):
            for piece in pieces_of(file, _PIECE_BYTES):
                yield Part(row_id(piece, 0), read_documents, (piece, source, seed), source.name)
            continue
        # Decompressed here and handed out: taking the text out of pages is most of the work.
        report = ReadReport()
        piece = whole(file)
        try:
            for rows in _batches(read_piece(piece, _reading(piece, source), report)):
                yield Part(row_id(piece, rows[0].index), _batch_documents, (rows, piece, source, seed), source.name)
        except UserError as error:
            raise _with_way_out(error) from error
        yield from _skipped(source, report)


def read_documents(piece: Piece, source: UserSource, seed: int) -> Iterator[Document | Skipped]:
    """Documents of one piece and at the end what was skipped; behind `source.max_documents` one more, and no further:
    it says that there are more.

    Of an HTML page the main text is taken. UserError: a record that is not right, under `stop`.
    """
    report = ReadReport()
    most = None if source.max_documents is None else source.max_documents + 1
    try:
        rows = read_piece(piece, _reading(piece, source), report)
        yield from islice(_documents(rows, piece, source, seed, report), most)
    except UserError as error:
        raise _with_way_out(error) from error
    yield from _skipped(source, report)


def _with_way_out(error: UserError) -> UserError:
    """The same, and that it can be skipped; a hint of another kind is about what cannot."""
    if error.hint is None or error.hint.startswith("fields there"):
        return UserError(error.message, "; ".join(filter(None, (error.hint, SKIP_HINT))))
    return error


def _batch_documents(rows: list[Row], piece: Piece, source: UserSource, seed: int) -> Iterator[Document | Skipped]:
    report = ReadReport()
    yield from _documents(rows, piece, source, seed, report)
    yield from _skipped(source, report)


def _reading(piece: Piece, source: UserSource) -> Reading:
    if piece.file.format == "warc":  # pages have html, and others text
        return Reading(source.on_error, required=())
    return Reading(source.on_error, columns={"text": source.text_field})


def _documents(
    rows: Iterable[Row], piece: Piece, source: UserSource, seed: int, report: ReadReport
) -> Iterator[Document]:
    for row in rows:
        text = row.value["text"] if "text" in row.value else page_text(row.value["html"], row.value["url"])
        if isinstance(text, str):
            split = split_of(text, source.valid_fraction, seed)
            yield Document(source.name, row_id(piece, row.index), text, source.kind, split)
        else:
            report.skip(text.reason, row_id(piece, row.index), str(row.value["url"]))


def _skipped(source: UserSource, report: ReadReport) -> Iterator[Skipped]:
    for reason, count in report.skipped.items():
        samples = tuple((sample["where"], sample["reason"]) for sample in report.samples_of(reason))
        yield Skipped(source.name, reason, count, samples)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += sum(len(value) for value in row.value.values() if isinstance(value, str))
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def page_text(html: str, url: str | None) -> str | Drop:
    """The main text of a page, or why there is none. UserError: extra `curation`, which takes it out, is missing."""
    from nemotron.data_prep.curation.extraction import ExtractionSettings, main_text
    from nemotron.data_prep.sources.warc import WarcRecord

    page = WarcRecord(0, url=url or "", status=200, content_type="text/html; charset=utf-8", body=html.encode())
    found = main_text(page, ExtractionSettings())
    return found[0] if isinstance(found, tuple) else found
