"""Every knob of crawl.py, extract.py and language.py. Imports only the standard library and pydantic.

"paper" is Nemotron-CC, arXiv 2412.02595. The other steps' knobs: dedup_schema.py and quality_schema.py.
"""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


# --- crawl.py ---------------------------------------------------------------------------------------------------------


class CrawlRun(Group):
    """Names of what is written."""

    script: Literal["crawl.py"] = Field("crawl.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: WARC files, labelled pages, evaluation sets")


class CrawlConfig(Group):
    """`nemotron data curate crawl`: the small crawl that comes with this recipe."""

    run: CrawlRun
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="over the files of demo_crawl/, which must be these")


# --- extract.py -------------------------------------------------------------------------------------------------------


def _state_of(locations: list[str]) -> str:
    """Changed files make another run, although the config reads the same. ValueError where there are none.

    Locations behind a URL are not looked at, nor are those in an artifact: that does not change, and its digest is in
    the run's identity already.
    """
    state, own = hashlib.sha256(), False
    for location in locations:
        if "://" in location or "(resolved at start)>" in location:
            continue
        path = Path(location).expanduser().absolute()
        if any((folder / "artifact.json").is_file() for folder in (path, *path.parents)):
            continue
        found, own = glob.glob(str(path), recursive=True), True  # noqa: PTH207  takes absolute patterns too
        if not found:
            missing = "no file matches" if glob.has_magic(location) else "no such file:"
            raise ValueError(
                f"warc: {missing} {location}; name yours: 'warc=[…]', of all steps 'extract:warc=[…]'; "
                "the demo: -c tiny"
            )
        paths = [path for name in found for path in ([Path(name)] if Path(name).is_file() else Path(name).rglob("*"))]
        for path in sorted({path for path in paths if path.is_file()}):
            status = path.stat()
            state.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16] if own else ""


class ExtractRun(Group):
    """Names of what is read and written."""

    script: Literal["extract.py"] = Field("extract.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    data: str | None = Field(None, description="artifact whose WARC files are read; null: only `warc` of one's own")
    output: str = Field(description="artifact written: documents")


class ExtractConfig(Group):
    """`nemotron data curate extract`."""

    run: ExtractRun
    warc: list[str] = Field(
        min_length=1, description="WARC files, folders, globs, addresses (s3://…, https://…): *.warc, *.warc.gz"
    )
    max_html_bytes: int = Field(2_000_000, ge=1000, description="a longer page is not parsed, but counted")
    max_seconds: float = Field(10.0, gt=0, description="CPU seconds for one page; then it is given up, and counted")
    min_chars: int = Field(25, ge=1, description="characters of main text; a page with fewer has none")
    max_replaced: float = Field(0.01, ge=0, le=1, description="share of a page's characters that may be undecodable")
    state: str = Field("", description="digest over own files' sizes and times of change, filled in")

    @model_validator(mode="after")
    def _files_exist_and_note_state(self) -> Self:
        self.state = _state_of(self.warc)
        return self


# --- language.py ------------------------------------------------------------------------------------------------------


class StepRun(Group):
    """Names of what is read and written."""

    config: str = Field("", description="name of this config; filled in")
    data: str = Field(description="artifact read: documents")
    output: str = Field(description="artifact written: documents")


class LanguageRun(StepRun):
    """Names of what is read and written."""

    script: Literal["language.py"] = Field("language.py", description="the script that this config is for")


class LanguageConfig(Group):
    """`nemotron data curate language`."""

    run: LanguageRun
    keep: list[str] = Field(["en"], min_length=1, description="languages to keep, ISO 639-1")
    threshold: float = Field(0.3, ge=0, le=1, description="least probability of the language (paper: 0.3)")
    min_letters: int = Field(40, ge=1, description="a text with fewer letters is too short to tell")
    short_texts: Literal["drop", "keep"] = Field("drop", description="what happens to a text that is too short to tell")
    max_chars: int = Field(4000, ge=200, description="characters of a text that are looked at")
