"""Every knob of the steps: names and files here, what their tasks go by in kit/schemas/curation.py.

"paper" is Nemotron-CC, arXiv 2412.02595; "Curator" is NeMo Curator.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_runspec.user_files import UserFiles
from nemotron.kit.schemas.curation import (
    ClassifierSettings,
    ExtractionSettings,
    FiltersConfig,
    Label,
    LanguageSettings,
    MinHashSettings,
    PiiSettings,
    RephrasingSettings,
    SubstringSettings,
)
from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.sources import DataRunConfig, Location, StepRunConfig


class CrawlConfig(Group):
    """`nemotron data curate crawl`: the small crawl that comes with this recipe."""

    run: DataRunConfig
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="over the files of demo_crawl/, which must be these")


# --- extract.py -------------------------------------------------------------------------------------------------------


class ExtractRun(DataRunConfig):
    """Names of what is read and written."""

    data: str | None = Field(None, description="artifact whose WARC files are read; null: only `warc` of one's own")


_NAME_YOURS = "name yours: 'warc=[…]', of all steps 'extract:warc=[…]'; the demo: -c tiny"


class ExtractConfig(ExtractionSettings):
    """`nemotron data curate extract`."""

    run: ExtractRun
    warc: list[Annotated[Location, UserFiles(hint=lambda location: _NAME_YOURS)]] = Field(
        min_length=1, description="WARC files, folders, globs, addresses (s3://…, https://…): *.warc, *.warc.gz"
    )


class LanguageConfig(LanguageSettings):
    """`nemotron data curate language`."""

    run: StepRunConfig


# --- exact_dedup.py, fuzzy_dedup.py, substring_dedup.py ---------------------------------------------------------------


class ExactDedupConfig(Group):
    """`nemotron data curate exact_dedup`."""

    run: StepRunConfig
    normalisation: Literal["none", "whitespace"] = Field(
        "none",
        description="what does not count. none: every character counts (Curator); whitespace: Unicode NFC, and runs of "
        "whitespace are one space",
    )


class FuzzyDedupConfig(Group):
    """`nemotron data curate fuzzy_dedup`."""

    run: StepRunConfig
    minhash: MinHashSettings = Field(default_factory=MinHashSettings)


class SubstringDedupConfig(SubstringSettings):
    """`nemotron data curate substring_dedup`."""

    run: StepRunConfig


# --- quality.py -------------------------------------------------------------------------------------------------------


class CrawlRun(StepRunConfig):
    """Names of what is read and written."""

    crawl: str | None = Field(
        None, description="artifact that `training` or `evaluation` names files in; null: files of your own"
    )


class TrainingConfig(ClassifierSettings):
    """What the classifiers learn from, and how."""

    positive: list[Location] = Field(min_length=1, description="documents of good quality: files, folders or globs")
    negative: list[Location] = Field(
        min_length=1, description="documents of any other quality: files, folders or globs"
    )
    held_out_fraction: float = Field(
        0.3, ge=0, lt=1, description="share of these documents, by the hash of their text, to measure on; 0: none"
    )
    max_documents: int = Field(
        50_000, ge=100, description="documents trained on, and measured on, at most: those of the smallest hashes"
    )


class QualityConfig(Group):
    """`nemotron data curate quality`."""

    run: CrawlRun
    seed: int = Field(
        0, ge=0, le=2**32 - 1, description="of the split into training and held-out pages, and of the trees"
    )
    training: TrainingConfig
    labels: dict[Label, int] = Field(
        {"low": 0, "medium-low": 7, "medium": 12, "medium-high": 18, "high": 19},
        description="label -> its lowest bucket of 0 to 19; the borders are this recipe's",
    )
    min_bucket: int = Field(0, ge=0, le=19, description="documents of lower buckets are dropped; 0: none")

    @field_validator("labels")
    @classmethod
    def _labels_cover_all(cls, labels: dict[Label, int]) -> dict[Label, int]:
        lows = sorted(labels.values())
        if not lows or lows[0] != 0 or lows[-1] > 19 or len(set(lows)) != len(lows):
            raise ValueError("the lowest buckets must be different, between 0 and 19, and one of them 0")
        return labels


# --- pii.py, heuristics.py, decontaminate.py, rephrase.py -------------------------------------------------------------


class PiiConfig(PiiSettings):
    """`nemotron data curate pii`."""

    run: StepRunConfig


class HeuristicsConfig(Group):
    """`nemotron data curate heuristics`."""

    run: StepRunConfig
    exempt: list[Label] = Field(["high"], description="quality labels whose documents are not filtered (paper: high)")
    filters: FiltersConfig


class DecontaminateConfig(Group):
    """`nemotron data curate decontaminate`."""

    run: CrawlRun
    evaluation: list[Location] = Field(
        [], description="files of evaluation sets: JSONL or Parquet; files, folders or globs"
    )
    fields: list[str] = Field(
        ["question", "problem", "prompt", "answer"],
        min_length=1,
        description="columns whose texts, one after another, are protected, those within lists and objects too; what a "
        "file lacks is left out",
    )
    environment_tasks: int = Field(
        500, ge=0, description="evaluation tasks of each environment whose prompts are protected"
    )
    ngram: int = Field(
        13, ge=5, le=50, description="words in common that make a leak (Brown et al. 2020, appendix C: 13)"
    )
    boilerplate_documents: int = Field(10, ge=0, description="an n-gram in more documents than this is no leak (ibid.)")

    @model_validator(mode="after")
    def _something_to_protect(self) -> Self:
        if not self.evaluation and not self.environment_tasks:
            raise ValueError("nothing to protect: evaluation is empty and environment_tasks is 0")
        return self


class RephraseConfig(RephrasingSettings):
    """`nemotron data curate rephrase`."""

    run: StepRunConfig
