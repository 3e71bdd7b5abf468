"""What the steps of a curation go by: groups of config keys, to which a recipe's schema adds names and files.

Pydantic only, so that a schema that subclasses them loads in a moment. "paper" is Nemotron-CC, arXiv 2412.02595;
"Curator" is NeMo Curator, with which its data was made, and whose defaults for deduplication are those of
docs.nvidia.com/nemo/curator, "Process data", "Deduplication".
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from nemotron.kit.schemas.group import Group, Seed
from nemotron.kit.schemas.limits import LimitConfig

Label = Literal["low", "medium-low", "medium", "medium-high", "high"]
"""Of quality."""


class Settings(Group):
    """What a step's tasks go by, and nothing else of its config."""

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """These keys of a config that has more of them."""
        return cls(**{name: getattr(config, name) for name in cls.model_fields})


class ExtractionSettings(Settings):
    """From pages to their main text. `max_seconds` is a net under the parser: with a limit that pages really meet, the
    result would depend on the machine."""

    max_html_bytes: int = Field(2_000_000, ge=1000, description="a longer page is not parsed, but counted")
    max_seconds: float = Field(10.0, gt=0, description="CPU seconds for one page; then it is given up, and counted")
    min_chars: int = Field(25, ge=1, description="characters of main text; a page with fewer has none")
    max_replaced: float = Field(0.01, ge=0, le=1, description="share of a page's characters that may be undecodable")


class LanguageSettings(Settings):
    """Which languages stay. Of a text longer than `max_chars`, its middle is looked at: there is least navigation."""

    keep: list[str] = Field(["en"], min_length=1, description="languages to keep, ISO 639-1")
    threshold: float = Field(0.3, ge=0, le=1, description="least probability of the language (paper: 0.3)")
    min_letters: int = Field(40, ge=1, description="a text with fewer letters is too short to tell")
    short_texts: Literal["drop", "keep"] = Field("drop", description="what happens to a text that is too short to tell")
    max_chars: int = Field(4000, ge=200, description="characters of a text that are looked at")


# --- Duplicates -------------------------------------------------------------------------------------------------------


class MinHashSettings(Settings):
    """Signatures and locality-sensitive hashing. The S-curve that follows from them is printed."""

    unit: Literal["characters", "words"] = Field("characters", description="what shingles are made of (Curator)")
    shingle_size: int = Field(24, ge=1, le=1000, description="units of a shingle (Curator: char_ngrams 24)")
    num_bands: int = Field(20, ge=1, le=500, description="bands; one equal band makes a candidate (Curator: 20)")
    rows_per_band: int = Field(13, ge=1, le=100, description="permutations of a band (Curator: 13, so 260 in all)")
    min_estimate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="estimated Jaccard similarity that makes a candidate a near duplicate; 0: every one is (Curator)",
    )
    seed: Seed = Field(42, description="of the permutations (Curator: 42)")

    @property
    def num_permutations(self) -> int:
        """Length of a signature."""
        return self.num_bands * self.rows_per_band


class SubstringSettings(Settings):
    """Which repeated passages are cut out."""

    min_tokens: int = Field(
        50,
        ge=5,
        le=10_000,
        description="tokens from which a passage that occurs twice is cut (Lee et al. 2022: 50, of byte-pair encoding; "
        "here runs of characters without whitespace)",
    )
    min_tokens_left: int = Field(
        50, ge=1, description="a document that lost passages and has fewer tokens left is dropped"
    )
    range_bytes: int = Field(
        16 * 2**20,
        ge=2**16,
        description="compressed bytes of documents whose windows one task sorts; decides about memory only",
    )


# --- Quality ----------------------------------------------------------------------------------------------------------


class ClassifierSettings(Settings):
    """How the two classifiers of quality are trained."""

    hash_bits: int = Field(18, ge=8, le=24, description="words and pairs of words have 2**hash_bits weights")
    max_words: int = Field(2000, ge=50, description="words of a document, from its beginning, that are looked at")
    regularisation: float = Field(10.0, gt=0, description="inverse strength (C) of the logistic regression")
    num_trees: int = Field(60, ge=1, le=2000, description="boosted trees on the surface of a page")
    tree_depth: int = Field(3, ge=1, le=8, description="questions a tree asks in a row")
    tree_rate: float = Field(0.1, gt=0, le=1, description="learning rate of the boosting")


class TrainSettings(ClassifierSettings):
    """The same with the seed of the trees."""

    seed: int = Field(0, ge=0, le=2**32 - 1, description="of the trees")


class FiltersConfig(Group):
    """Limits of the heuristic filters; null switches one off."""

    word_count: LimitConfig | None = Field(None, description="words")
    mean_word_length: LimitConfig | None = Field(None, description="characters a word")
    longest_word: LimitConfig | None = Field(None, description="characters")
    stop_words: LimitConfig | None = Field(None, description="frequent English words")
    symbol_to_word_ratio: LimitConfig | None = Field(None, description="hashes or ellipses a word")
    placeholder_text: LimitConfig | None = Field(None, description="lorem ipsum")
    boilerplate_paragraphs: LimitConfig | None = Field(None, description="share on cookies, terms, privacy")
    bullet_lines: LimitConfig | None = Field(None, description="share of lines")
    ellipsis_lines: LimitConfig | None = Field(None, description="share of lines")
    lines_without_end_mark: LimitConfig | None = Field(None, description="share of lines")
    lines_with_end_mark: LimitConfig | None = Field(None, description="share of lines")
    short_lines: LimitConfig | None = Field(None, description="share of lines")
    longest_line: LimitConfig | None = Field(None, description="characters")
    mean_line_length: LimitConfig | None = Field(None, description="characters")
    alphabetic_words: LimitConfig | None = Field(None, description="share of words with a letter")
    non_alphanumeric: LimitConfig | None = Field(None, description="share of characters")
    digits: LimitConfig | None = Field(None, description="share of characters")
    url_chars: LimitConfig | None = Field(None, description="share of characters")
    white_space: LimitConfig | None = Field(None, description="share of characters")
    parentheses: LimitConfig | None = Field(None, description="share of characters")
    duplicate_lines: LimitConfig | None = Field(None, description="share of lines")
    duplicate_paragraphs: LimitConfig | None = Field(None, description="share of paragraphs")
    duplicate_line_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_paragraph_chars: LimitConfig | None = Field(None, description="share of characters")
    top_2gram_chars: LimitConfig | None = Field(None, description="share of characters")
    top_3gram_chars: LimitConfig | None = Field(None, description="share of characters")
    top_4gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_5gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_6gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_7gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_8gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_9gram_chars: LimitConfig | None = Field(None, description="share of characters")
    duplicate_10gram_chars: LimitConfig | None = Field(None, description="share of characters")


class HeuristicSettings(Settings):
    """Which documents the heuristic filters drop. A filter without limits is not applied."""

    limits: dict[str, LimitConfig | None] = Field(description="filter -> between what values a document passes")
    exempt: list[Label] = Field([], description="quality labels whose documents are not looked at")


PiiKind = Literal["private_key", "secret", "email", "iban", "credit_card", "ssn", "ipv6", "ipv4", "phone"]
PII_KINDS: tuple[str, ...] = get_args(PiiKind)
"""In the order in which they are looked for. Where two overlap, the earlier one stands: a card number is no telephone
number."""


class PiiSettings(Settings):
    """Which personal data is replaced."""

    kinds: list[PiiKind] = Field(list(get_args(PiiKind)), min_length=1, description="types to replace by a placeholder")
    keep_reserved: bool = Field(
        True, description="addresses that no person can have stay: example.com (RFC 2606), private and documentation IP"
    )


# --- Rephrasing -------------------------------------------------------------------------------------------------------


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

    def rules(self) -> dict[str, RuleConfig]:
        """The styles that are not left out."""
        return {style: rule for style, rule in self if rule is not None}


class RephrasingSettings(Settings):
    """Who is asked to reword what, and how."""

    endpoint: EndpointConfig
    styles: StylesConfig
    temperature: float = Field(0.5, ge=0, le=2, description="of sampling (Curator: 0.5)")
    top_p: float = Field(0.9, gt=0, le=1, description="of sampling (Curator: 0.9)")
    seed: Seed = Field(0, description="each request's seed follows from it, the document and the style")
    min_words: int = Field(30, ge=1, description="of a text that is worth a request (Curator: 30 tokens)")
