"""Pages of a made crawl: what stands on them, what was planted, how they look as HTML and as WARC records.

`planted_pages.jsonl.xz` holds 1,830 pages, one a line. Their text is made up: sentences put together from lists in
seven languages, and paragraphs from the docstrings of Python 3.11's standard library (© Python Software Foundation, PSF
License Version 2). The personal data on them is nobody's. Of each page is known what was planted in it
(`Page.planted`), so that the steps' precision and recall can be measured:

    language            language (ISO 639-1); on every page that is in one
    quality             level: 2 explanatory, 1 plain, 0 poor; on every English page that is not broken
    exact_duplicate_of  url of the page with the same main text
    near_duplicate_of   url, jaccard (true Jaccard similarity of word 5-grams of the two main texts)
    boilerplate         passage (its text, a line of its own in the main text), passage_id; on every page that has it
    pii                 type (email, phone, ip, credit_card, ssn, iban), value (as it stands in the text),
                        hard_negative: true where it only looks like one and has to stay
    low_quality         type (keyword_list, spam, symbol_soup, repeated_lines, placeholder, stub)
    contaminated        set (of the evaluation sets in demo_crawl/), item (its id), text (what stands in the main text)
    broken              type (empty, no_main_text, not_html, invalid_bytes, not_found, huge, truncated)

A page gets at most one planting of its own, so that the steps' scores do not mix. Its length, 3 to 8 paragraphs, is
drawn independently of its quality, and paragraphs of all levels mix explanations, everyday tales and clickbait in
different shares: neither length nor one word tells the quality.
"""

from __future__ import annotations

import html
import io
import json
import lzma
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

PAGES = Path(__file__).with_suffix(".jsonl.xz")
DATE = "2026-01-01T00:00:00Z"  # of every record: the same pages give the same bytes


@dataclass
class Page:
    """One page. `lines`: its main text, a paragraph a line, the first one its heading. `planted`: what is in it.

    `style`: a mirror looks like the page that it mirrors; "": as its url says.
    """

    url: str
    lines: list[str]
    language: str = "en"
    planted: list[dict[str, Any]] = field(default_factory=list)
    broken: str = ""
    charset: str = "utf-8"
    style: str = ""

    @property
    def text(self) -> str:
        """The main text."""
        return "\n".join(self.lines)

    def cases(self, kind: str) -> list[dict[str, Any]]:
        """What was planted of a kind."""
        return [case for case in self.planted if case["kind"] == kind]

    @property
    def level(self) -> int | None:
        """The planted quality of a page that has one and is neither a copy nor broken."""
        if self.cases("exact_duplicate_of") or self.cases("near_duplicate_of"):
            return None
        return next((case["level"] for case in self.cases("quality")), None)


def read_pages() -> list[Page]:
    """All pages."""
    with lzma.open(PAGES, "rt", encoding="utf-8") as file:
        return [Page(**json.loads(line)) for line in file]


# --- How it looks -----------------------------------------------------------------------------------------------------

_STYLE = "body{font-family:sans-serif;margin:0} .menu li{display:inline} .ad{background:#fee} #cookies{position:fixed}"
_SCRIPT = "window.tracker=window.tracker||[];tracker.push({page:location.href,time:Date.now()});function ok(){return 1}"
_MENU = ("Home", "News", "Archive", "Shop", "Events", "Contact", "Imprint", "Login")
_COOKIES = (
    "We and our partners use cookies to measure visits and to choose advertisements. By clicking accept you agree."
    " You can change your choice at any time in the settings."
)
_ADS = (
    "Advertisement: new kitchens from the factory, delivered and built in within two weeks!",
    "Sponsored: compare power suppliers now and save up to a third of your bill.",
    "Advertisement: learn the accordion in thirty days, first lesson free.",
)
_FOOTER = "All rights reserved. Terms of use. Privacy. Newsletter. Follow us on all channels."
_COMMENTS = ("First!", "Thanks for sharing, I did not know that.", "Does anybody know where to buy one of these?")


def render(page: Page) -> str:
    """The page as HTML: one of six layouts, by its style; menu, cookie banner, advertisement, script, footer."""
    random = Random(page.style or page.url)
    heading, *paragraphs = (html.escape(line, quote=False) for line in page.lines)
    body = "\n".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    menu = "".join(f'<li><a href="/{name.lower()}">{name}</a></li>' for name in _MENU)
    head = (
        f'<meta charset="{page.charset}"><title>{heading} | {page.url.split("/")[2]}</title>'
        f"<style>{_STYLE}</style><script>{_SCRIPT}</script>"
    )
    banner = f'<div id="cookies" class="cookie-banner"><p>{_COOKIES}</p><button onclick="ok()">Accept</button></div>'
    ad = f'<div class="ad"><p>{random.choice(_ADS)}</p></div>'
    footer = f'<footer class="footer"><p>{_FOOTER}</p></footer>'
    match random.randrange(6):
        case 0:
            main = (
                f"<header><nav><ul>{menu}</ul></nav></header><main><article><h1>{heading}</h1>{body}</article></main>"
            )
            main += f"<aside>{ad}</aside>{footer}"
        case 1:
            main = f'<ul class="menu">{menu}</ul>{ad}<div class="post-content"><h1>{heading}</h1>{body}</div>{footer}'
        case 2:
            entry = f'<div class="entry"><h2>{heading}</h2>{body}</div>'
            main = f'<nav>{menu}</nav><div id="content">{entry}{ad}</div>{footer}'
        case 3:
            main = (
                f'<div class="sidebar"><ul>{menu}</ul>{ad}</div><article class="article-body"><h1>{heading}</h1>{body}'
                f"</article><script>{_SCRIPT}</script>{footer}"
            )
        case 4:  # a table for a layout, as around 2003: nothing says which cell is the text
            cell = f"<font size=4><b>{heading}</b></font><br><br>" + "<br><br>".join(paragraphs)
            main = (
                f'<table width="100%"><tr><td colspan=2>{menu}</td></tr><tr><td width=160>{ad}<ul>{menu}</ul></td>'
                f"<td>{cell}</td></tr><tr><td colspan=2><small>{_FOOTER}</small></td></tr></table>"
            )
        case _:  # names without a meaning, and the opinions of readers below
            body = "".join(f'<div class="x7f"><span>{paragraph}</span></div>' for paragraph in paragraphs)
            comments = "".join(f'<li class="comment"><b>guest</b><p>{text}</p></li>' for text in _COMMENTS)
            main = (
                f'<div class="a1">{menu}</div><div class="q9"><h1>{heading}</h1>{body}</div>'
                f'<div class="related">{ad}</div>'
                f'<div id="comments"><ol class="commentlist">{comments}</ol></div>{footer}'
            )
    opening = f'<!DOCTYPE html>\n<html lang="{page.language or "en"}"><head>{head}</head>'
    return f"{opening}\n<body>{banner}\n{main}</body></html>\n"


# --- WARC -------------------------------------------------------------------------------------------------------------


def write_crawl(folder: Path, pages: list[Page], num_files: int) -> None:
    """Write pages as WARC files `crawl-NNNNN.warc.gz`. Of the truncated ones each has one at most, at its end."""
    folder.mkdir()
    truncated = [page for page in pages if page.broken == "truncated"]
    whole = [page for page in pages if page.broken != "truncated"]
    for number in range(num_files):
        write_warc(folder / f"crawl-{number:05d}.warc.gz", whole[number::num_files] + truncated[number::num_files])


def write_warc(path: Path, pages: Iterable[Page]) -> None:
    """Write pages as one gzipped WARC file, a member a record. A page that is broken as "truncated" ends the file."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        info = writer.create_warcinfo_record(path.name, {"software": "nemotron", "format": "WARC File Format 1.0"})
        info.rec_headers.replace_header("WARC-Date", DATE)
        info.rec_headers.replace_header("WARC-Record-ID", _record_id(path.name))
        writer.write_record(info)
        for page in pages:
            status, content_type, body = _response(page)
            record = writer.create_warc_record(
                page.url,
                "response",
                payload=io.BytesIO(body),
                http_headers=StatusAndHeaders(status, [("Content-Type", content_type)], protocol="HTTP/1.1"),
                warc_headers_dict={"WARC-Date": DATE, "WARC-Record-ID": _record_id(page.url)},
            )
            begin = file.tell()
            writer.write_record(record)
            if page.broken == "truncated":
                file.truncate(begin + (file.tell() - begin) // 2)
                return


def _record_id(name: str) -> str:
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}>"


def _response(page: Page) -> tuple[str, str, bytes]:
    """HTTP status, content type and body."""
    text = render(page)
    # Half of the pages that are not utf-8 say so only in their head.
    content_type = (
        "text/html" if page.charset != "utf-8" and len(page.url) % 2 else f"text/html; charset={page.charset}"
    )
    match page.broken:
        case "empty":
            return "200 OK", content_type, b""
        case "no_main_text":
            bare = Page(page.url, ["Login"])
            return "200 OK", content_type, render(bare).encode()
        case "not_html":
            return "200 OK", "image/jpeg", b"\xff\xd8\xff\xe0" + Random(page.url).randbytes(2000)
        case "invalid_bytes":
            body = text.encode()
            middle = body.index(page.lines[-1].encode())
            return "200 OK", content_type, body[:middle] + b"\xc3\x28 \xff\xfe \xe2\x82 " + body[middle:]
        case "not_found":
            return "404 Not Found", content_type, text.encode()
        case "huge":
            return (
                "200 OK",
                content_type,
                text.replace("</body>", "<p>again and again</p>" * 200_000 + "</body>").encode(),
            )
    return "200 OK", content_type, text.encode(page.charset)
