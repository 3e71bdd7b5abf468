"""Every knob of quality.py, pii.py, heuristics.py, decontaminate.py and rephrase.py.

"paper" is Nemotron-CC, arXiv 2412.02595; "Curator" is NeMo Curator, which has its filters and its prompts' limits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.limits import LimitConfig
from nemotron.kit.schemas.sources import Location, StepRunConfig

Label = Literal["low", "medium-low", "medium", "medium-high", "high"]
LABELS: dict[Label, int] = {"low": 0, "medium-low": 7, "medium": 12, "medium-high": 18, "high": 19}


# --- quality.py -------------------------------------------------------------------------------------------------------


class CrawlRun(StepRunConfig):
    """Names of what is read and written."""

    crawl: str | None = Field(
        None, description="artifact that `training` or `evaluation` names files in; null: files of your own"
    )


class TrainingConfig(Group):
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
    hash_bits: int = Field(18, ge=8, le=24, description="words and pairs of words have 2**hash_bits weights")
    max_words: int = Field(2000, ge=50, description="words of a document, from its beginning, that are looked at")
    regularisation: float = Field(10.0, gt=0, description="inverse strength (C) of the logistic regression")
    num_trees: int = Field(60, ge=1, le=2000, description="boosted trees on the surface of a page")
    tree_depth: int = Field(3, ge=1, le=8, description="questions a tree asks in a row")
    tree_rate: float = Field(0.1, gt=0, le=1, description="learning rate of the boosting")


class QualityConfig(Group):
    """`nemotron data curate quality`."""

    run: CrawlRun
    seed: int = Field(0, ge=0, description="of the split into training and held-out pages, and of the trees")
    training: TrainingConfig
    labels: dict[Label, int] = Field(
        default_factory=lambda: dict(LABELS),
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


# --- pii.py -----------------------------------------------------------------------------------------------------------

PiiKind = Literal["private_key", "secret", "email", "iban", "credit_card", "ssn", "ipv6", "ipv4", "phone"]


class PiiConfig(Group):
    """`nemotron data curate pii`."""

    run: StepRunConfig
    kinds: list[PiiKind] = Field(
        ["private_key", "secret", "email", "iban", "credit_card", "ssn", "ipv6", "ipv4", "phone"],
        min_length=1,
        description="types to replace by a placeholder",
    )
    keep_reserved: bool = Field(
        True, description="addresses that no person can have stay: example.com (RFC 2606), private and documentation IP"
    )


# --- heuristics.py ----------------------------------------------------------------------------------------------------


def _at_most(high: float) -> LimitConfig:
    return LimitConfig(high=high)


def _limit(default: LimitConfig | None, description: str) -> LimitConfig | None:
    value: LimitConfig | None = Field(default, description=description)
    return value


class FiltersConfig(Group):
    """Limits of the filters; null switches one off. Gopher is arXiv 2112.11446 (A.1.1, table A1), C4 is 1910.10683
    (2.2), FineWeb is 2406.17557 (3.6)."""

    word_count: LimitConfig | None = _limit(LimitConfig(low=50, high=100_000), "words (Gopher)")
    mean_word_length: LimitConfig | None = _limit(LimitConfig(low=3, high=10), "characters a word (Gopher)")
    longest_word: LimitConfig | None = _limit(_at_most(1000), "characters (C4)")
    stop_words: LimitConfig | None = _limit(LimitConfig(low=2), "frequent English words (Gopher)")
    symbol_to_word_ratio: LimitConfig | None = _limit(_at_most(0.1), "hashes or ellipses a word (Gopher)")
    placeholder_text: LimitConfig | None = _limit(_at_most(0), "lorem ipsum (C4)")
    boilerplate_paragraphs: LimitConfig | None = _limit(_at_most(0.4), "share on cookies, terms, privacy (C4, Curator)")
    bullet_lines: LimitConfig | None = _limit(_at_most(0.9), "share of lines (Gopher)")
    ellipsis_lines: LimitConfig | None = _limit(_at_most(0.3), "share of lines (Gopher)")
    lines_without_end_mark: LimitConfig | None = _limit(_at_most(0.85), "share of lines (C4, Curator)")
    lines_with_end_mark: LimitConfig | None = _limit(None, "share of lines (FineWeb: above 0.12; not in Curator)")
    short_lines: LimitConfig | None = _limit(None, "share of lines (FineWeb: below 0.67; not in Curator)")
    longest_line: LimitConfig | None = _limit(None, "characters (StarCoder: at most 1000, of code; not in Curator)")
    mean_line_length: LimitConfig | None = _limit(None, "characters (StarCoder: at most 100, of code; not in Curator)")
    alphabetic_words: LimitConfig | None = _limit(LimitConfig(low=0.8), "share of words with a letter (Gopher)")
    non_alphanumeric: LimitConfig | None = _limit(_at_most(0.25), "share of characters (Curator)")
    digits: LimitConfig | None = _limit(_at_most(0.15), "share of characters (Curator)")
    url_chars: LimitConfig | None = _limit(_at_most(0.2), "share of characters (Curator)")
    white_space: LimitConfig | None = _limit(_at_most(0.25), "share of characters (Curator)")
    parentheses: LimitConfig | None = _limit(_at_most(0.1), "share of characters (Curator)")
    duplicate_lines: LimitConfig | None = _limit(_at_most(0.3), "share of lines (Gopher)")
    duplicate_paragraphs: LimitConfig | None = _limit(_at_most(0.3), "share of paragraphs (Gopher)")
    duplicate_line_chars: LimitConfig | None = _limit(_at_most(0.2), "share of characters (Gopher; FineWeb: 0.1)")
    duplicate_paragraph_chars: LimitConfig | None = _limit(_at_most(0.2), "share of characters (Gopher)")
    top_2gram_chars: LimitConfig | None = _limit(_at_most(0.2), "share of characters (Gopher)")
    top_3gram_chars: LimitConfig | None = _limit(_at_most(0.18), "share of characters (Gopher)")
    top_4gram_chars: LimitConfig | None = _limit(_at_most(0.16), "share of characters (Gopher)")
    duplicate_5gram_chars: LimitConfig | None = _limit(_at_most(0.15), "share of characters (Gopher)")
    duplicate_6gram_chars: LimitConfig | None = _limit(_at_most(0.14), "share of characters (Gopher)")
    duplicate_7gram_chars: LimitConfig | None = _limit(_at_most(0.13), "share of characters (Gopher)")
    duplicate_8gram_chars: LimitConfig | None = _limit(_at_most(0.12), "share of characters (Gopher)")
    duplicate_9gram_chars: LimitConfig | None = _limit(_at_most(0.11), "share of characters (Gopher)")
    duplicate_10gram_chars: LimitConfig | None = _limit(_at_most(0.10), "share of characters (Gopher)")

    @model_validator(mode="before")
    @classmethod
    def _keep_the_other_limit(cls, limits: Any) -> Any:
        # `filters.word_count.low=30` alone leaves `high` as it is.
        if not isinstance(limits, dict):
            return limits
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: defaults[name].model_dump() | value
            if isinstance(value, dict) and isinstance(defaults.get(name), LimitConfig)
            else value
            for name, value in limits.items()
        }


class HeuristicsConfig(Group):
    """`nemotron data curate heuristics`."""

    run: StepRunConfig
    exempt: list[Label] = Field(["high"], description="quality labels whose documents are not filtered (paper: high)")
    filters: FiltersConfig = Field(default_factory=FiltersConfig)


# --- decontaminate.py -------------------------------------------------------------------------------------------------


class DecontaminateConfig(Group):
    """`nemotron data curate decontaminate`."""

    run: CrawlRun
    evaluation: list[Location] = Field(
        [], description="files of evaluation sets: JSONL or Parquet; files, folders or globs"
    )
    fields: list[str] = Field(
        ["question", "problem", "prompt", "answer"],
        min_length=1,
        description="columns whose texts, one after another, are protected; those that a file lacks are left out",
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


# --- rephrase.py ------------------------------------------------------------------------------------------------------


def _is_endpoint(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "no user, password or query in it: the address is kept in records; a key goes into api_key_env"
        )
    return value


class EndpointConfig(Group):
    """An OpenAI-compatible endpoint, and how patiently it is asked."""

    base_url: Annotated[str, AfterValidator(_is_endpoint)] = Field(description="ends before /chat/completions")
    model: str = Field(min_length=1, description="as the endpoint calls it")
    api_key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="name of the environment variable with the API key"
    )
    concurrency: int = Field(16, ge=1, le=1024, description="requests at a time")
    timeout: float = Field(300.0, gt=0, description="seconds until an answer begins, and again until it is complete")
    max_attempts: int = Field(6, ge=1, le=20, description="of one request")
    max_failed: float = Field(0.01, ge=0, le=1, description="share of a shard's requests that may fail for good")


class RuleConfig(Group):
    """Which documents a style is for. Words here, tokens there: Curator counts three words as four tokens, roughly."""

    labels: list[Label] = Field(min_length=1, description="quality labels")
    max_input_words: int = Field(ge=20, description="of a text that is sent at once; a longer one is cut")
    max_output_tokens: int = Field(ge=16, description="of an answer")


class StylesConfig(Group):
    """Styles; null leaves one out."""

    wikipedia: RuleConfig | None = Field(None, description="encyclopedia prose")
    diverse_qa: RuleConfig | None = Field(None, description="questions of several kinds, below their text")
    distill: RuleConfig | None = Field(None, description="a shorter version")
    extract_knowledge: RuleConfig | None = Field(None, description="a textbook passage")
    knowledge_list: RuleConfig | None = Field(None, description="a list of facts")


class RephraseConfig(Group):
    """`nemotron data curate rephrase`."""

    run: StepRunConfig
    endpoint: EndpointConfig
    styles: StylesConfig
    temperature: float = Field(0.5, ge=0, le=2, description="of sampling (Curator: 0.5)")
    top_p: float = Field(0.9, gt=0, le=1, description="of sampling (Curator: 0.9)")
    seed: int = Field(0, ge=0, description="each request's seed follows from it, the document and the style")
    min_words: int = Field(30, ge=1, description="of a text that is worth a request (Curator: 30 tokens)")
