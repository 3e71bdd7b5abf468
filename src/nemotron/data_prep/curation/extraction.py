"""From crawled pages to their main text: WARC records in, documents out, and a count of everything that gave none.

warcio reads the records, trafilatura finds the main text (Barbaresi 2021, "Trafilatura"). What cannot be read is never
lost in silence: a record that is damaged is counted under the reason, and reading goes on at the next one.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import re
import signal
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import FrameType
from typing import Any, BinaryIO, cast

from nemo_runspec.errors import RunspecError, UserError
from nemotron.data_prep.curation.step import DocumentWriter, Drop, StepTable, output_name
from nemotron.data_prep.curation.text_quality import normalise
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import open_binary
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput

_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)
_HEADER_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)
_READ, _SCAN = 1 << 16, 1 << 20  # bytes at a time, of a member and in search of the next one
_MAX_HEADER = 1 << 16  # bytes of a record's header, HTTP's included
_HTML_TYPES = ("text/html", "application/xhtml+xml")
# What browsers read for a label, where Python's codec of that name knows fewer characters (WHATWG, Encoding, 4.2).
_WIDER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
_LAYOUT_CHARS = 400  # of text in one cell; data tables have numbers and names
_MARKUP_BYTES = 2048  # the head of a page, in which its charset has to stand


@dataclass(frozen=True, slots=True)
class ExtractionSettings:
    """What `extract_shard` goes by.

    `max_html_bytes`: a longer page is not parsed. `max_seconds`: CPU time for one page, a net under the parser; with a
    limit that pages really meet, the result would depend on the machine. `min_chars`: less is no main text.
    `max_replaced`: share of a page's characters that may be unreadable bytes; they are taken out. `source`: goes
    into the documents.
    """

    max_html_bytes: int = 2_000_000
    max_seconds: float = 10.0
    min_chars: int = 25
    max_replaced: float = 0.01
    source: str = "crawl"


@dataclass(frozen=True, slots=True)
class Response:
    """A page as it was crawled, or, with `problem`, a record that could not be read.

    `offset`: byte in the WARC file at which its record begins, or the gzip member that holds it; `number`: of the
    record in that member, from 0. `body`: decoded as its headers say (gzip, chunks), and cut beyond the limit that
    `read_responses` was given. `encoding`: one that its headers name (br, zstd) and that could not be taken off.
    """

    offset: int
    url: str = ""
    date: str = ""
    status: int = 0
    content_type: str = ""
    body: bytes = b""
    problem: str = ""
    number: int = 0
    encoding: str = ""


# --- Reading --------------------------------------------------------------------------------------------------------


def plan_extraction(files: Sequence[SourceFile], settings: Mapping[str, Any]) -> Plan:
    """A shard of work for each WARC file, named as the file is. UserError: two files of one name, one that holds no
    pages (WET: text), one that is compressed by other means than gzip."""
    shards: dict[str, Shard] = {}
    for file in files:
        name = shard_name(file)
        if ".wet" in PurePosixPath(file.name).suffixes:
            raise UserError(f"warc: {file.name} holds text, not pages", "name the WARC files alone, as in *.warc.gz")
        if file.compression == "zstd":
            raise UserError(f"warc: {file.name}: of compressed WARC files only *.gz are read", "decompress it: zstd -d")
        if name in shards:
            both = f"{shards[name].work['file']['uri']} and {file.uri}"
            raise UserError(f"warc: two files are called {name}: {both}", "documents are named after them: rename one")
        shards[name] = Shard(name, {"file": file.to_json()})
    inputs = [{"uri": file.uri, "size": file.size, "version": file.version} for file in files]
    return Plan(settings=dict(settings), inputs=inputs, shards=list(shards.values()))


def shard_name(file: SourceFile) -> str:
    """The file's name without folders and suffixes: `crawl-00001` of `/data/crawl-00001.warc.gz`."""
    return file.name.rpartition("/")[2].removesuffix(".gz").removesuffix(".warc")


def read_responses(source: SourceFile, max_body_bytes: int) -> Iterator[Response]:
    """Yield the response records of a WARC file; of each body at most one byte more than `max_body_bytes`.

    A damaged record (flipped bytes, a file that ends in the middle) comes as a `Response` with `problem`, and reading
    goes on where the next record begins. Memory holds one record, cut to the limit.

    Raises what `sources.open_binary` raises: the file is gone, or another than the one that was listed.
    """
    with open_binary(source) as file:
        compressed = file.read(2) == b"\x1f\x8b"
        offset: int | None = 0
        rest = b""  # of the file, read beyond the member before
        while offset is not None and offset < source.size:
            if not rest:
                file.seek(offset)
            member = _Member(file, rest)
            stream = io.BufferedReader(member) if compressed else cast("io.BufferedReader[Any]", file)
            begin, number, held, rest = offset, 0, None, b""
            try:
                while True:
                    record = _read_record(stream, max_body_bytes + _MAX_HEADER)
                    if held is not None:
                        yield held
                    if record is None:
                        break
                    held = _response(record, begin, number, max_body_bytes)
                    number += 1
                    if not compressed:
                        begin, number = file.tell(), 0
                        if held is not None:
                            yield held
                        held = None  # else held back until the member has ended well: its checksum comes last
                offset, rest = (member.end, member.rest) if compressed else (None, b"")
            except (_DamagedError, zlib.error, EOFError) as error:
                yield Response(begin, problem=" ".join(str(error).split())[:100], number=number)
                offset = _next_record(file, begin + 1, compressed=compressed)


class _DamagedError(Exception):
    """A record that is not what its header says."""


class _Member(io.RawIOBase):
    """One gzip member of a file, decompressed as it is read.

    `begun`: its first bytes, where they were read already. Once it is read, `end` is where the next one begins and
    `rest` what was read of that.
    """

    def __init__(self, file: BinaryIO, begun: bytes) -> None:
        self._file = file
        self._begun = begun
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.end, self.rest = 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._inflate.eof:
            data = self._inflate.unconsumed_tail or self._begun or self._file.read(_READ)
            self._begun = b""
            if not data:
                raise EOFError("the file ends in the middle of a gzip member")
            if part := self._inflate.decompress(data, len(buffer)):
                buffer[: len(part)] = part
                return len(part)
        if not self.end:
            self.rest = self._inflate.unused_data
            self.end = self._file.tell() - len(self.rest)
        return 0


def _read_record(stream: io.BufferedReader[Any], limit: int) -> tuple[bytes, bytes, int] | None:
    """Header, content (at most `limit` bytes of it) and length of the content; None at the end."""
    if not (line := stream.readline(_MAX_HEADER)):
        return None
    if not line.startswith(b"WARC/"):
        raise _DamagedError("no WARC header where a record should begin")
    header, length = line, None
    while (line := stream.readline(_MAX_HEADER)) not in (b"\r\n", b"\n"):
        if not line or len(header) > _MAX_HEADER:
            raise _DamagedError("the header of the record does not end")
        header += line
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            length = int(value)
    if length is None:
        raise _DamagedError("the header of the record has no length")
    content, left = stream.read(min(length, limit)), length - min(length, limit)
    missing = min(length, limit) - len(content)
    while left and not missing:
        skipped = len(stream.read(min(left, _SCAN)))
        left, missing = left - skipped, 0 if skipped else left
    if missing:
        raise _DamagedError(f"the record ends {missing} bytes before its end")
    while stream.peek(1)[:1] in (b"\r", b"\n"):
        stream.read(1)  # blank lines between records
    return header, content, length


def _response(record: tuple[bytes, bytes, int], offset: int, number: int, max_body_bytes: int) -> Response | None:
    """A record as a page; None for one of another type."""
    try:
        from warcio.archiveiterator import WARCIterator
        from warcio.bufferedreaders import BufferedReader
    except ImportError:
        raise UserError("reading WARC files needs warcio", "pip install -e '.[curation]'") from None
    header, content, length = record
    try:
        parsed = next(WARCIterator(io.BytesIO(header + b"\r\n" + content)), None)
        if parsed is None or parsed.rec_type != "response":
            return None
        headers, page = parsed.http_headers, parsed.content_stream()
        body = b""
        if length > len(content):  # too large in any case, and what is encoded cannot be decoded to the end
            page = parsed.raw_stream
        while len(body) <= max_body_bytes and (more := page.read(max_body_bytes + 1 - len(body))):
            body += more
    except Exception as error:  # flipped bytes take the parser to where nobody else has been
        raise _DamagedError(f"{type(error).__name__}: {error}") from error
    status = headers.get_statuscode() if headers else ""
    encoding = (headers.get_header("Content-Encoding") or "" if headers else "").strip().lower()
    return Response(
        offset,
        parsed.rec_headers.get_header("WARC-Target-URI") or "",
        parsed.rec_headers.get_header("WARC-Date") or "",
        int(status) if status and status.isascii() and status.isdigit() else 0,
        (headers.get_header("Content-Type") or "" if headers else "").lower(),
        body,
        number=number,
        encoding=""
        if encoding in (*BufferedReader.get_supported_decompressors(), "identity", "none", "")
        else encoding,
    )


def _next_record(file: BinaryIO, begin: int, *, compressed: bool) -> int | None:
    """Where the next record begins at or after byte `begin`: a gzip member or a plain header; None: nowhere."""
    mark = b"\x1f\x8b\x08" if compressed else b"\nWARC/1."
    file.seek(begin)
    before, offset = b"", begin
    while chunk := file.read(_SCAN):
        window = before + chunk
        found = window.find(mark)
        if found >= 0:
            return offset - len(before) + found + (not compressed)
        offset += len(chunk)
        before = window[-len(mark) + 1 :]
    return None


# --- Main text ------------------------------------------------------------------------------------------------------


def decode(body: bytes, content_type: str) -> tuple[str, str]:
    """A page's bytes as text, and the encoding that was used.

    In the order of the WHATWG's encoding standard: byte order mark, HTTP header, `meta` in the head; without any of
    them, utf-8 if that fits, else Windows-1252. Bytes that do not fit become U+FFFD.
    """
    for mark, name in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace"), name
    declared = _HEADER_CHARSET.search(content_type)
    in_head = _META_CHARSET.search(body[:_MARKUP_BYTES])
    for name in (declared[1] if declared else "", in_head[1].decode("ascii", "replace") if in_head else ""):
        # LookupError: no codec. UnicodeError: one that cannot replace ("undefined", which scripts write; "idna").
        with contextlib.suppress(LookupError, UnicodeError):
            encoding = codecs.lookup(name).name if name else ""
            encoding = _WIDER.get(encoding, encoding)
            if encoding.startswith("utf-16") and not declared:
                encoding = "utf-8"  # else the head could not have been read
            # "hex" and its like are codecs, too, and so is how Python writes strings.
            if encoding and codecs.lookup(encoding)._is_text_encoding and "escape" not in encoding:
                return body.decode(encoding, "replace"), encoding
    with contextlib.suppress(UnicodeDecodeError):
        return body.decode("utf-8"), "utf-8"
    return body.decode("cp1252", "replace"), "cp1252"


def main_text(response: Response, settings: ExtractionSettings) -> tuple[str, tuple[str, ...]] | Drop:
    """The main text of a page, with remarks on it; or why it has none."""
    if response.problem:
        return Drop("damaged record", response.problem)
    if response.status and response.status != 200:
        return Drop(f"status {response.status // 100}xx", str(response.status))
    kind = response.content_type.partition(";")[0].strip()
    if kind and kind not in _HTML_TYPES:
        return Drop("not HTML", kind)
    if not response.body.strip():
        return Drop("empty page")
    if response.encoding and not _is_text(response.body):  # else whoever fetched it has taken it off
        return Drop("content encoding that is not read", response.encoding)
    if len(response.body) > settings.max_html_bytes:
        return Drop("page too large")
    page, encoding = decode(response.body, response.content_type)
    replaced = page.count("\ufffd")
    if replaced > settings.max_replaced * len(page):
        return Drop("undecodable bytes", f"{replaced} of {len(page)} characters")
    try:
        with _time_limit(settings.max_seconds):
            text = _extract(page)
    except _TooSlow:
        return Drop("page too slow", f"{settings.max_seconds:g} s")
    except RunspecError:
        raise
    except Exception as error:  # a fault of the parser's, which one page in millions finds
        return Drop("unreadable markup", f"{type(error).__name__}: {error}"[:100])
    text = normalise((text or "").replace("\ufffd", ""))
    if len(text) < settings.min_chars:
        return Drop("no main text")
    notes = (f"decoded from {encoding}",) if encoding != "utf-8" else ()
    return text, notes + (("some undecodable bytes",) if replaced else ())


def _is_text(body: bytes) -> bool:
    """Whether bytes are utf-8, which compressed ones never are."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(body)  # which takes half a character at the end
    except UnicodeDecodeError:
        return False
    return True


def _extract(page: str) -> str | None:
    try:
        import trafilatura
    except ImportError as error:
        raise UserError(f"main text needs trafilatura ({error})", "pip install -e '.[curation]'") from None
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # what it says of a page is in the table
    tree = trafilatura.load_html(page)
    if tree is None:
        return None
    _dissolve_layout_tables(tree)
    found: str | None = trafilatura.extract(tree, include_comments=False, include_tables=True)
    return found


def _dissolve_layout_tables(tree: Any) -> None:
    """Turn tables that only place things on the page into plain blocks, so that their cells are no rows of a table.

    One is a table without headings that has a cell with running text.
    """
    for table in list(tree.iter("table")):
        longest = max((len(cell.text_content()) for cell in table.iter("td")), default=0)
        if longest > _LAYOUT_CHARS and next(table.iter("th"), None) is None:
            for element in [table, *table.iter("tbody", "tr", "td")]:
                element.tag = "div"


class _TooSlow(Exception):
    pass


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow after so much CPU time of this process; in a thread other than the main one, without a limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- A task ---------------------------------------------------------------------------------------------------------


def extract_shard(shard: Shard, settings: ExtractionSettings, output: ShardOutput) -> dict[str, Any]:
    """A task: the pages of one WARC file to one document shard. In its table, bytes read are those of the pages."""
    source, table = SourceFile.from_json(shard.work["file"]), StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for response in read_responses(source, settings.max_html_bytes):
            table.read.add_bytes(len(response.body))
            document = {
                "id": f"{shard.name}:{response.offset}" + (f"+{response.number}" if response.number else ""),
                "text": "",
                "source": settings.source,
                "url": response.url,
            }
            found = main_text(response, settings)
            if isinstance(found, Drop):
                table.drop(document | {"text": response.url}, found.reason, found.detail, len(response.body))
                continue
            document["text"], notes = found
            document["date"] = response.date
            table.keep(document, notes)
            writer.write(document)
    return {"table": table.to_json()}
