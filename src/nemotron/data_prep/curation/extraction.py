"""From crawled pages to their main text: WARC records in, documents out, and a count of everything that gave none.

sources/warc.py reads the records, trafilatura finds the main text (Barbaresi 2021, "Trafilatura"). A page that gives
no text is counted under its reason, as is a damaged record.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import FrameType
from typing import Any

from nemo_runspec.errors import RunspecError, UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.curation.step import DocumentWriter, Drop, StepTable, output_name
from nemotron.data_prep.sources.documents import normalise
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.warc import HTML_TYPES, WarcRecord, decode_page, read_records
from nemotron.data_prep.work.shards import InputFile, Plan, Shard, ShardOutput
from nemotron.kit.schemas.curation import ExtractionSettings

_LAYOUT_CHARS = 400  # of text in one cell; data tables have numbers and names


# --- Plan --------------------------------------------------------------------------------------------------------


def plan_extraction(files: Sequence[SourceFile], settings: Mapping[str, Any]) -> Plan[SourceFile]:
    """A shard of work for each WARC file, named as the file is. UserError: two files of one name, one that holds no
    pages (WET: text), one that is compressed by other means than gzip."""
    shards: dict[str, Shard[SourceFile]] = {}
    for file in files:
        name = shard_name(file)
        if ".wet" in PurePosixPath(file.name).suffixes:
            raise UserError(f"warc: {file.name} holds text, not pages", "name the WARC files alone, as in *.warc.gz")
        if file.compression == "zstd":
            raise UserError(f"warc: {file.name}: of compressed WARC files only *.gz are read", "decompress it: zstd -d")
        if not name.isprintable() or "\\" in name:
            raise UserError(f"warc: {file.name!r}: no artifact can hold a file of this name", "rename it")
        if name in shards:
            both = f"{shards[name].work.name} and {file.name}"
            raise UserError(f"warc: two files are called {name}: {both}", "documents are named after them: rename one")
        shards[name] = Shard(name, file)
    inputs = [InputFile(file.uri, file.size, file.version) for file in files]
    return Plan(settings=dict(settings), inputs=inputs, shards=list(shards.values()))


def shard_name(file: SourceFile) -> str:
    """The file's name without folders and suffixes: `crawl-00001` of `/data/crawl-00001.warc.gz`."""
    return file.name.rpartition("/")[2].removesuffix(".gz").removesuffix(".warc")


# --- Main text ------------------------------------------------------------------------------------------------------


def main_text(response: WarcRecord, settings: ExtractionSettings) -> tuple[str, tuple[str, ...]] | Drop:
    """The main text of a page, with remarks on it; or why it has none."""
    if response.problem:
        return Drop("damaged record", response.problem)
    if response.status and response.status != 200:
        return Drop(f"HTTP status {response.status // 100}xx", str(response.status))
    kind = response.content_type.partition(";")[0].strip()
    if kind and kind not in HTML_TYPES:
        return Drop("not HTML", kind)
    if not response.body.strip():
        return Drop("empty page")
    if response.encoding:
        return Drop("content encoding that is not read", response.encoding)
    if len(response.body) > settings.max_html_bytes:
        return Drop("page too large")
    page, encoding = decode_page(response.body, response.content_type)
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


def page_text(html: str, url: str | None) -> str | Drop:
    """The main text of a page that is decoded already, or why there is none.

    UserError: extra `curation`, which takes it out, is missing.
    """
    page = WarcRecord(0, url=url or "", status=200, content_type="text/html; charset=utf-8", body=html.encode())
    text = main_text(page, ExtractionSettings())
    return text if isinstance(text, Drop) else text[0]


def _extract(page: str) -> str | None:
    try:
        import trafilatura
    except ImportError as error:
        raise UserError(f"main text needs trafilatura ({error})", install_line("curation")) from None
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # what it says of a page is in the table
    tree = trafilatura.load_html(page)
    if tree is None:
        return None
    _dissolve_layout_tables(tree)
    text: str | None = trafilatura.extract(tree, include_comments=False, include_tables=True)
    return text


def _dissolve_layout_tables(tree: Any) -> None:
    """Turn tables that only place things on the page into plain blocks, so that their cells are no rows of a table.

    One is a table without headings that has a cell with running text.
    """
    for table in list(tree.iter("table")):
        longest = max((len(cell.text_content()) for cell in table.iter("td")), default=0)
        if longest > _LAYOUT_CHARS and next(table.iter("th"), None) is None:
            for element in [table, *table.iter("tbody", "tr", "td")]:
                element.tag = "div"


class _TooSlow(BaseException):
    """No Exception: trafilatura takes one of its slow fallbacks for a page on which they find nothing, and goes on."""


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


def extract_shard(shard: Shard[SourceFile], settings: ExtractionSettings, output: ShardOutput) -> StepTable:
    """A task: the pages of one WARC file to one document shard. In its table, bytes read are those of the pages."""
    source, table = shard.work, StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for response in read_records(source, settings.max_html_bytes):
            if response.kind not in ("response", ""):  # a damaged record has no kind
                continue
            table.read.add_bytes(len(response.body))
            document = {
                "id": f"{shard.name}:{response.offset}" + (f"+{response.number}" if response.number else ""),
                "text": "",
                "source": "crawl",
                "url": response.url,
            }
            result = main_text(response, settings)
            if isinstance(result, Drop):
                table.drop(document | {"text": response.url}, result.reason, result.detail, len(response.body))
                continue
            document["text"], notes = result
            document["date"] = response.date
            table.keep(document, notes)
            writer.write(document)
    return table
