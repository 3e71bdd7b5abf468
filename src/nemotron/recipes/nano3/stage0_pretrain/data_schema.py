"""Every knob of this stage's `data_prep.py`; "tech report" is arXiv 2512.20848 (Nemotron 3 Nano)."""

from __future__ import annotations

import platform
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.conversations import ChatTemplate
from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES, RLVR_FAMILIES, DifficultyConfig, Family
from nemotron.kit.schemas.group import Group, Seed
from nemotron.kit.schemas.limits import LimitConfig
from nemotron.kit.schemas.questions import Questions
from nemotron.kit.schemas.sources import (
    DataPrepConfig,
    OwnSourceConfig,
    PhaseConfig,
    check_names,
    check_phase_ends,
)


class StdlibConfig(Group):
    """Documents from the standard library of the running interpreter."""

    enabled: bool = Field(True, description="read it: sources stdlib_code and stdlib_docs")
    python: str = Field(
        default_factory=platform.python_version,
        description="version of the interpreter, filled in: another one has another library, so it is another data set",
    )
    max_code_chars: int = Field(8000, ge=500, description="characters of a code document, cut between statements")
    max_docs_chars: int = Field(4000, ge=500, description="characters of a prose document, cut between docstrings")


class TasksConfig(Group):
    """Worked tasks from the environments' generators as plain text; training split only."""

    families: list[Family] = Field(list(DEFAULT_FAMILIES), min_length=1, description="which")
    num_tasks: int = Field(400_000, ge=0, description="tasks of each family at scale full; 0: no source tasks")
    seed: Seed = Field(1, description="of the generators; the split goes by the task, not by this")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )


class SourceConfig(OwnSourceConfig):
    """A source of your own documents."""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    other_names: ClassVar[dict[str, str]] = OwnSourceConfig.other_names | {"text_field": "columns: {text: …}"}

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="its name in the blend and of its files")
    weight: float = Field(0.2, ge=0, le=1, description="share of all tokens, in phases that do not name the source")
    kind: Literal["prose", "code"] = Field("prose", description="which quality heuristics apply")
    valid_fraction: float = Field(0.02, ge=0, lt=1, description="share of documents held out, by hash of the text")
    max_documents: int | None = Field(
        None, ge=1, description="documents read at most, the first ones, at every scale; null: all"
    )


class ProseConfig(Group):
    """Limits for prose; null switches a filter off. Gopher is arXiv 2112.11446 (A.1.1)."""

    word_count: LimitConfig | None = Field(
        LimitConfig(low=20), description="words (Gopher: 50, of web pages; a docstring is rightly shorter)"
    )
    mean_word_length: LimitConfig | None = Field(
        LimitConfig(low=3, high=12), description="characters a word (Gopher: 3 to 10; identifiers are longer)"
    )
    alphabetic_words: LimitConfig | None = Field(
        LimitConfig(low=0.6), description="share of words with a letter (Gopher: 0.8; technical prose has operators)"
    )
    digits: LimitConfig | None = Field(LimitConfig(high=0.15), description="share of characters (NeMo Curator)")
    duplicate_lines: LimitConfig | None = Field(LimitConfig(high=0.3), description="share of lines (Gopher)")


class CodeConfig(Group):
    """Limits for source code; null switches a filter off. StarCoder is arXiv 2305.06161 (3.1)."""

    word_count: LimitConfig | None = Field(LimitConfig(low=10), description="words")
    longest_line: LimitConfig | None = Field(LimitConfig(high=1000), description="characters (StarCoder)")
    mean_line_length: LimitConfig | None = Field(LimitConfig(high=100), description="characters (StarCoder)")
    non_alphanumeric: LimitConfig | None = Field(LimitConfig(high=0.75), description="share of characters (StarCoder)")
    digits: LimitConfig | None = Field(
        LimitConfig(high=0.15), description="share of characters: tables of numbers and character maps"
    )


class MinHashConfig(Group):
    """Near duplicates. With 16 bands of 8 rows, a pair of similarity 0.71 is compared in half of all cases, one of 0.80
    in 94 %."""

    unit: Literal["characters", "words"] = Field("words", description="what shingles are made of")
    shingle_size: int = Field(5, ge=1, description="units of a shingle")
    num_bands: int = Field(16, ge=1, le=256, description="bands of a signature")
    rows_per_band: int = Field(8, ge=1, le=64, description="rows of a band; bands x rows permutations")
    min_estimate: float = Field(0.8, ge=0, le=1, description="estimated similarity that makes a copy")


class CurationConfig(Group):
    """What is dropped."""

    prose: ProseConfig = Field(default_factory=ProseConfig, description="quality heuristics for kind prose")
    code: CodeConfig = Field(default_factory=CodeConfig, description="quality heuristics for kind code")
    minhash: MinHashConfig = Field(default_factory=MinHashConfig, description="near duplicates, tasks aside")
    ngram: int = Field(13, ge=5, le=50, description="words; shared with held-out or evaluation text: an overlap")
    boilerplate_documents: int = Field(10, ge=0, description="an n-gram in more documents than this is no overlap")
    evaluation_tasks: int = Field(500, ge=0, description="evaluation tasks of each family whose prompts are protected")


class TokenizerConfig(Group):
    """Byte-level BPE, trained on a sample mixed like the blend."""

    vocab_size: int = Field(131_072, ge=272, description="tokens, with 16 special ones and 256 bytes (tech report 2)")
    sample_bytes: int = Field(400_000_000, ge=1000, description="bytes of text that the merges are learned from")
    conversations: int = Field(
        0, ge=0, description="tasks of each family that the merges are learned from as conversations, too"
    )
    families: list[Family] = Field(list(RLVR_FAMILIES), description="those families")
    model_max_length: int = Field(8192, ge=1, description="tokens; written to tokenizer_config.json")
    chat_template: ChatTemplate = "nano3"


class LongContextConfig(Group):
    """Documents as long as the windows of a long-context phase, and their blend with that of the last phase."""

    length: int = Field(ge=64, description="tokens of a document with its questions: dataset.seq_length of the phase")
    share: float = Field(0.2, ge=0, lt=1, description="of its tokens: documents with questions (tech report 2.5)")
    num_documents: int = Field(ge=2, description="such documents at scale full, at most")
    retrieval_share: float = Field(0.01, ge=0, lt=1, description="of its tokens: synthetic retrieval (tech report 2.5)")
    num_retrieval: int = Field(ge=2, description="documents of synthetic retrieval at scale full")
    facts: int = Field(ge=1, description="facts in such a document; at its end each is asked for")
    repeats: int = Field(ge=1, description="how often a fact is said in it, at random places")
    words: int = Field(ge=2, description="words that keys are drawn from, and as many that values are")

    @model_validator(mode="after")
    def _shares_leave_room(self) -> Self:
        if self.share + self.retrieval_share >= 1:
            raise ValueError(f"share {self.share} + retrieval_share {self.retrieval_share} leave nothing to the blend")
        return self


class PretrainDataConfig(DataPrepConfig):
    """`nemotron nano3 data prep pretrain`."""

    seed: Seed = Field(1234, description="of document order, held-out split and MinHash")
    stdlib: StdlibConfig = Field(default_factory=StdlibConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sources: list[SourceConfig] = Field([], description="your own documents; a path alone is a source of weight 0.2")
    questions: Questions = Field([])
    curation: CurationConfig = Field(default_factory=CurationConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    blend: list[PhaseConfig] = Field(description="phases: diversity, then quality from 94 % on (tech report 2.3)")
    long_context: LongContextConfig | None = Field(
        None, description="also the data of a long-context phase, in the folder `long`; null: none"
    )

    @model_validator(mode="after")
    def _names_and_phases_fit(self) -> Self:
        ours = ["stdlib_code", "stdlib_docs", "tasks"]
        if self.long_context is not None:  # further sources of its blend
            ours += ["long", "retrieval"]
        check_names([source.name for source in self.sources] + ours)
        check_phase_ends(self.blend, "blend")
        if not (self.stdlib.enabled or self.tasks.num_tasks or self.sources):
            raise ValueError("no source of documents: stdlib.enabled is false, tasks.num_tasks is 0, sources is empty")
        return self

    @model_validator(mode="after")
    def _weights_leave_room(self) -> Self:
        enabled = {
            "stdlib_code": self.stdlib.enabled,
            "stdlib_docs": self.stdlib.enabled,
            "tasks": self.tasks.num_tasks,
        }
        for phase in self.blend:
            added = {f"sources.{i}.weight": s for i, s in enumerate(self.sources) if s.name not in phase.weights}
            total = round(sum(source.weight for source in added.values()), 9)
            others = sorted(name for name, weight in phase.weights.items() if weight > 0 and enabled.get(name, True))
            if total > 1 or (total == 1 and others):
                limit = f"below 1, to leave a share to {', '.join(others)}" if others else "at most 1"
                weights = " + ".join(f"{source.weight:g}" for source in added.values())
                sum_text = f"{weights} = {total:g}" if len(added) > 1 else weights
                raise ValueError(f"{' + '.join(added)} = {sum_text} in blend phase {phase.name!r}: must be {limit}")
        return self
