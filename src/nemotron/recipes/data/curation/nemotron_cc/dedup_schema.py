"""Every knob of exact_dedup.py, fuzzy_dedup.py and substring_dedup.py.

"Curator" is NeMo Curator, with which Nemotron-CC (arXiv 2412.02595) was deduplicated; its defaults are those of
docs.nvidia.com/nemo/curator, "Process data", "Deduplication".
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.sources import StepRunConfig

# --- exact_dedup.py ---------------------------------------------------------------------------------------------------


class ExactDedupConfig(Group):
    """`nemotron data curate exact_dedup`."""

    run: StepRunConfig
    normalisation: Literal["none", "whitespace"] = Field(
        "none",
        description="what does not count. none: every character counts (Curator); whitespace: Unicode NFC, and runs of "
        "whitespace are one space",
    )


# --- fuzzy_dedup.py ---------------------------------------------------------------------------------------------------


class MinHashConfig(Group):
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
    seed: int = Field(42, ge=0, description="of the permutations (Curator: 42)")


class FuzzyDedupConfig(Group):
    """`nemotron data curate fuzzy_dedup`."""

    run: StepRunConfig
    minhash: MinHashConfig = Field(default_factory=MinHashConfig)


# --- substring_dedup.py -----------------------------------------------------------------------------------------------


class SubstringDedupConfig(Group):
    """`nemotron data curate substring_dedup`."""

    run: StepRunConfig
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
