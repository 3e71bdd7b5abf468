"""Pages of a made-up crawl: what stands on them, what was planted, how they look as HTML and as WARC records.

Of each page is known what was planted in it (`Page.planted`), so that the steps' precision and recall can be measured:

    language            language (ISO 639-1); on every page that is in one
    quality             level: 2 explanatory, 1 plain, 0 poor; on every English page that is not broken
    exact_duplicate_of  url of the page with the same main text
    near_duplicate_of   url, jaccard (true Jaccard similarity of word 5-grams of the two main texts)
    boilerplate         passage (its text, a line of its own in the main text), passage_id; on every page that has it
    pii                 type (email, phone, ip, credit_card, ssn, iban), value (as it stands in the text),
                        hard_negative: true where it only looks like one and has to stay
    low_quality         type (keyword_list, spam, symbol_soup, repeated_lines, placeholder, stub)
    contaminated        set (of the evaluation sets), item (its id), text (what stands in the main text)
    broken              type (empty, no_main_text, not_html, invalid_bytes, not_found, huge, truncated)
"""

from __future__ import annotations

import html
import io
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from nemotron.data_prep.curation.decontamination import words

from . import crawl_texts as texts

DATE = "2026-01-01T00:00:00Z"  # of every record: two crawls of one seed are the same bytes
SHINGLE_WORDS = 5
# Shares of the pages that begin with a text of their own; what is planted in them comes on top.
_SHARE_FOREIGN, _SHARE_POOR, _SHARE_GOOD = 0.22, 0.15, 0.30
# Level of quality -> how often a paragraph explains, tells of everyday things, wants to be clicked on. They overlap, as
# on the web, so that telling them apart takes more than one word.
_MIXTURES = {2: (0.75, 0.2, 0.05), 1: (0.2, 0.7, 0.1), 0: (0.1, 0.3, 0.6)}
_JACCARDS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.5, 0.3)


@dataclass
class Page:
    """One page. `lines`: its main text, a paragraph a line, the first one its heading. `planted`: what is in it."""

    url: str
    lines: list[str]
    language: str = "en"
    planted: list[dict[str, Any]] = field(default_factory=list)
    broken: str = ""
    charset: str = "utf-8"
    style: str = ""

    def __post_init__(self) -> None:
        """The look of a page follows from its url; a mirror looks like what it mirrors."""
        self.style = self.style or self.url

    @property
    def text(self) -> str:
        """The main text."""
        return "\n".join(self.lines)


def make_pages(num_pages: int, seed: int, sets: dict[str, list[dict[str, str]]]) -> list[Page]:
    """All pages, in random order. `sets`: the evaluation sets of which some items are to leak."""
    random = Random(seed)
    explanations = iter(texts.explanations(random))
    pages = [_first_page(number, random, explanations, num_pages) for number in range(num_pages)]
    plain = [page for page in pages if page.language == "en" and page.planted[-1].get("level", 0) > 0]
    random.shuffle(plain)
    chosen = iter(plain)  # a page gets at most one planting of its own, so that the steps' scores do not mix

    def take(share: float) -> list[Page]:
        return [page for page, _ in zip(chosen, range(round(share * num_pages)), strict=False)]

    for number, page in enumerate(take(0.08)):
        _plant_personal(page, texts.PII_TYPES[number % len(texts.PII_TYPES)], random, hard_negative=False)
    for number, page in enumerate(take(0.06)):
        _plant_personal(page, texts.PII_TYPES[number % len(texts.PII_TYPES)], random, hard_negative=True)
    for number, page in enumerate(take(0.08)):
        passage = number // 3 % len(texts.BOILERPLATE)  # on three pages at least, however few there are
        _insert(page, texts.BOILERPLATE[passage], random)
        page.planted.append({"kind": "boilerplate", "passage_id": passage, "passage": texts.BOILERPLATE[passage]})
    items = [(name, item) for name, rows in sets.items() for item in rows]
    random.shuffle(items)
    for number, (page, (name, item)) in enumerate(zip(take(0.03), items, strict=False)):
        leaked = f"{item['question']} {item['answer']}"
        if number % 2:  # the same words, written in another way
            leaked = leaked.upper().replace(",", " -").replace(".", " !")
        _insert(page, leaked, random)
        page.planted.append({"kind": "contaminated", "set": name, "item": item["id"], "text": leaked})

    originals = take(0.05)
    added = [_copy(page, number) for number, page in enumerate(originals)]
    long = [page for page in chosen if len(words(page.text)) >= 120][: round(0.08 * num_pages)]
    added += [_near_copy(page, _JACCARDS[n % len(_JACCARDS)], n, random) for n, page in enumerate(long)]
    for number in range(round(0.06 * num_pages)):
        kind = texts.LOW_QUALITY[number % len(texts.LOW_QUALITY)]
        page = Page(_url(random, num_pages + number), [texts.title(random), *texts.low_quality(kind, random)])
        if kind in ("symbol_soup", "placeholder"):
            page.language = ""  # in none
        page.planted += [_quality(0), {"kind": "low_quality", "type": kind}]
        added.append(page)
    added += [_broken_page(number, random) for number in range(max(14, round(0.03 * num_pages)))]
    for page in added:
        if page.language:
            page.planted.insert(0, {"kind": "language", "language": page.language})
    pages += added
    random.shuffle(pages)
    return pages


# --- What stands on a page --------------------------------------------------------------------------------------------


def _first_page(number: int, random: Random, explanations: Iterator[str], num_pages: int) -> Page:
    share = number / num_pages
    length = random.randrange(3, 9)  # paragraphs, whatever the quality: length alone must not tell it
    if share < _SHARE_FOREIGN:
        language = texts.LANGUAGES[number % len(texts.LANGUAGES)]
        paragraphs = [texts.foreign(language, random, random.randrange(3, 6)) for _ in range(length)]
        page = Page(_url(random, number), [texts.title(random, language), *paragraphs], language)
        if language in ("de", "fr", "es") and number % 2:
            page.charset = "iso-8859-1"
        page.planted.append({"kind": "language", "language": language})
        return page
    level = 0 if share < _SHARE_FOREIGN + _SHARE_POOR else 2 if share > 1 - _SHARE_GOOD else 1
    paragraphs = [_paragraph(level, random, explanations) for _ in range(length)]
    page = Page(_url(random, number), [texts.title(random), *paragraphs])
    page.planted += [{"kind": "language", "language": "en"}, _quality(level)]
    return page


def _paragraph(level: int, random: Random, explanations: Iterator[str]) -> str:
    pool = random.choices(("explanation", "everyday", "clickbait"), _MIXTURES[level])[0]
    if pool == "explanation" and (paragraph := next(explanations, None)):
        return paragraph
    return (texts.clickbait if pool == "clickbait" else texts.everyday)(random, random.randrange(2, 5))


def _quality(level: int) -> dict[str, Any]:
    return {"kind": "quality", "level": level}


def _url(random: Random, number: int) -> str:
    site = random.choice(
        ["www.harbour-notes.example", "blog.tin-kettle.example", "news.lowland.example", "wiki.example"]
    )
    return f"https://{site}/{random.choice(['a', 'post', 'item', 'p'])}/{number:05d}"


def _insert(page: Page, line: str, random: Random) -> None:
    page.lines.insert(random.randrange(2, len(page.lines) + 1), line)


def _plant_personal(page: Page, kind: str, random: Random, *, hard_negative: bool) -> None:
    sentence, value = texts.personal(kind, random, hard_negative=hard_negative)
    line = random.randrange(1, len(page.lines))
    page.lines[line] += f" {sentence}"
    page.planted.append({"kind": "pii", "type": kind, "value": value, "hard_negative": hard_negative})


def _copy(page: Page, number: int) -> Page:
    planted = [dict(case) for case in page.planted if case["kind"] == "quality"]
    planted.append({"kind": "exact_duplicate_of", "url": page.url})
    url = f"https://mirror-{number % 3}.example/copy/{number}"
    return Page(url, list(page.lines), planted=planted, style=page.style)


def _near_copy(page: Page, target: float, number: int, random: Random) -> Page:
    """A page whose Jaccard similarity to `page` is the first below `target` as its words are replaced one by one."""
    copy = Page(f"https://reprint-{number % 3}.example/near/{number}", list(page.lines), style=page.style)
    original = _shingles(page.text)
    spots = [(line, word) for line in range(1, len(copy.lines)) for word in range(len(copy.lines[line].split()))]
    random.shuffle(spots)
    similarity = 1.0
    for edit, (line, word) in enumerate(spots):
        if similarity <= target:
            break
        changed = copy.lines[line].split()
        changed[word] = f"{random.choice(['amber', 'cobalt', 'quiet', 'sudden', 'twelve'])}{'aeiou'[edit % 5]}"
        copy.lines[line] = " ".join(changed)
        other = _shingles(copy.text)
        similarity = len(original & other) / len(original | other)
    copy.planted = [dict(case) for case in page.planted if case["kind"] == "quality"]
    copy.planted.append({"kind": "near_duplicate_of", "url": page.url, "jaccard": round(similarity, 4)})
    return copy


def _shingles(text: str) -> set[tuple[str, ...]]:
    tokens = words(text)
    return {tuple(tokens[i : i + SHINGLE_WORDS]) for i in range(max(1, len(tokens) - SHINGLE_WORDS + 1))}


_BROKEN = ("empty", "no_main_text", "not_html", "invalid_bytes", "not_found", "huge", "truncated")


def _broken_page(number: int, random: Random) -> Page:
    kind = _BROKEN[number % len(_BROKEN)]
    lines = [texts.title(random), *(texts.everyday(random, 3) for _ in range(4))]
    page = Page(f"https://broken.example/{kind}/{number}", lines, broken=kind)
    page.planted.append({"kind": "broken", "type": kind})
    return page


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
    random = Random(page.style)
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
