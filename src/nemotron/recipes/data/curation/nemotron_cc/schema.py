"""Every knob of crawl.py, extract.py and language.py.

"paper" is Nemotron-CC, arXiv 2412.02595. The other steps' knobs: dedup_schema.py and quality_schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_runspec.user_files import UserFiles
from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.sources import DataRunConfig, Location, StepRunConfig

# --- crawl.py ---------------------------------------------------------------------------------------------------------


class CrawlConfig(Group):
    """`nemotron data curate crawl`: the small crawl that comes with this recipe."""

    run: DataRunConfig
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="over the files of demo_crawl/, which must be these")


# --- extract.py -------------------------------------------------------------------------------------------------------


class ExtractRun(DataRunConfig):
    """Names of what is read and written."""

    data: str | None = Field(None, description="artifact whose WARC files are read; null: only `warc` of one's own")


_NAME_YOURS = "name yours: 'warc=[…]', of all steps 'extract:warc=[…]'; the demo: -c tiny"


class ExtractConfig(Group):
    """`nemotron data curate extract`."""

    run: ExtractRun
    warc: list[Annotated[Location, UserFiles(hint=_NAME_YOURS)]] = Field(
        min_length=1, description="WARC files, folders, globs, addresses (s3://…, https://…): *.warc, *.warc.gz"
    )
    max_html_bytes: int = Field(2_000_000, ge=1000, description="a longer page is not parsed, but counted")
    max_seconds: float = Field(10.0, gt=0, description="CPU seconds for one page; then it is given up, and counted")
    min_chars: int = Field(25, ge=1, description="characters of main text; a page with fewer has none")
    max_replaced: float = Field(0.01, ge=0, le=1, description="share of a page's characters that may be undecodable")


# --- language.py ------------------------------------------------------------------------------------------------------


class LanguageConfig(Group):
    """`nemotron data curate language`."""

    run: StepRunConfig
    keep: list[str] = Field(["en"], min_length=1, description="languages to keep, ISO 639-1")
    threshold: float = Field(0.3, ge=0, le=1, description="least probability of the language (paper: 0.3)")
    min_letters: int = Field(40, ge=1, description="a text with fewer letters is too short to tell")
    short_texts: Literal["drop", "keep"] = Field("drop", description="what happens to a text that is too short to tell")
    max_chars: int = Field(4000, ge=200, description="characters of a text that are looked at")
