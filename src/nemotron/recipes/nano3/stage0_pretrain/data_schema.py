"""Every knob of this stage's `data_prep.py`. Imports only the standard library and pydantic, so that it loads anywhere.

"tech report" is arXiv 2512.20848 (Nemotron 3 Nano).
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemotron.kit.schemas.difficulty import DifficultyConfig
from nemotron.kit.schemas.group import Group


class RunConfig(Group):
    """Names of what is written."""

    script: Literal["data_prep.py"] = Field("data_prep.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: the token blend with its tokenizer")


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

    num_tasks: int = Field(400_000, ge=0, description="tasks of each family at scale full; 0: no source tasks")
    seed: int = Field(1, ge=0, description="of the generators; the split goes by the task, not by this")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )


_READ = "JSONL, text, WARC, WET, each plain, .gz or .zst; Parquet, Arrow"


class SourceConfig(Group):
    """A source of your own documents."""

    other_names: ClassVar[dict[str, str]] = {"locations": "paths", "path": "paths", "columns": "text_field"}

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="its name in the blend and of its files")
    paths: list[str] = Field(min_length=1, description="files, globs, folders, addresses (s3 gs https hf): " + _READ)
    weight: float = Field(0.2, ge=0, le=1, description="share of all tokens, in phases that do not name the source")
    kind: Literal["prose", "code"] = Field("prose", description="which quality heuristics apply")
    text_field: str = Field("text", description="field of JSONL, Parquet and Arrow; dots for nested ones")
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="at a record or file that cannot be read: stop and name it, or skip and count it"
    )
    valid_fraction: float = Field(0.02, ge=0, lt=1, description="share of documents held out, by hash of the text")
    max_documents: int | None = Field(
        None, ge=1, description="documents read at most, the first ones, at every scale; null: all"
    )
    state: str = Field("", description="digest over the files' sizes and times of change, filled in")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        """A path alone is a source named after its file or folder. ValueError: no name can be made of it."""
        if isinstance(given, str):
            name = re.sub(r"[^a-z0-9]+", "_", Path(given.rstrip("/")).name.split(".")[0].lower()).strip("_")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"no name can be made of {given!r}: write {{name: mine, paths: [{given}]}}")
            return {"name": name, "paths": [given]}
        return given

    @field_validator("paths")
    @classmethod
    def _files_exist(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if "://" not in path and not _local_files(path):
                raise ValueError(f"no such file: {path}" if not glob.has_magic(path) else f"no file matches {path}")
        return paths

    @model_validator(mode="after")
    def _note_state(self) -> Self:
        # Changed files make another run, although the config reads the same. What is elsewhere is not asked here.
        state = hashlib.sha256()
        for name in sorted({name for path in self.paths if "://" not in path for name in _local_files(path)}):
            status = os.lstat(name)
            state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        self.state = state.hexdigest()[:16]
        return self


def _local_files(path: str) -> set[str]:
    """What a path or glob of this machine stands for, with all that lies below a folder."""
    found = set(glob.glob(str(Path(path).expanduser()), recursive=True))  # noqa: PTH207  takes absolute patterns too
    found |= {str(Path(path).expanduser())} if Path(path).expanduser().exists() else set()  # brackets may be its name
    for folder in [name for name in found if Path(name).is_dir()]:
        found |= {os.path.join(base, name) for base, _, names in os.walk(folder) for name in names}  # noqa: PTH118
    return found


class CurationConfig(Group):
    """What is dropped. Thresholds of the quality heuristics stand in nemotron/data_prep/curation/text_quality.py."""

    near_duplicate_jaccard: float = Field(0.8, gt=0, le=1, description="similarity of word 5-grams that makes a copy")
    ngram: int = Field(13, ge=5, le=50, description="words; shared with held-out or evaluation text: an overlap")
    boilerplate_documents: int = Field(10, ge=0, description="an n-gram in more documents than this is no overlap")
    evaluation_tasks: int = Field(500, ge=0, description="evaluation tasks of each family whose prompts are protected")


class TokenizerConfig(Group):
    """Byte-level BPE, trained on a sample mixed like the blend."""

    vocab_size: int = Field(131_072, ge=272, description="tokens, with 16 special ones and 256 bytes (tech report 2)")
    sample_bytes: int = Field(400_000_000, ge=1000, description="bytes of text that the merges are learned from")
    model_max_length: int = Field(8192, ge=1, description="tokens; written to tokenizer_config.json")


class PhaseConfig(Group):
    """One phase of the blend."""

    name: str = Field(description="for people")
    until: float = Field(gt=0, le=1, description="share of all training tokens at which the phase ends")
    weights: dict[str, float] = Field(description="source -> weight; weights of a phase are normalised to sum 1")


class PretrainDataConfig(Group):
    """`nemotron nano3 data prep pretrain`."""

    run: RunConfig
    scale: Literal["tiny", "small", "medium", "full"] = Field(
        "full", description="share of the generated counts to use"
    )
    seed: int = Field(1234, ge=0, description="of document order, held-out split and MinHash")
    stdlib: StdlibConfig = Field(default_factory=StdlibConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sources: list[SourceConfig] = Field([], description="your own documents; a path alone is a source of weight 0.2")
    curation: CurationConfig = Field(default_factory=CurationConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    blend: list[PhaseConfig] = Field(description="phases: diversity, then quality from 94 % on (tech report 2.3)")

    @model_validator(mode="after")
    def _names_and_phases_fit(self) -> Self:
        names = [source.name for source in self.sources] + ["stdlib_code", "stdlib_docs", "tasks"]
        if len(names) != len(set(names)):
            raise ValueError(f"sources: two sources of one name among {', '.join(sorted(names))}")
        ends = [phase.until for phase in self.blend]
        if not ends or ends != sorted(set(ends)) or ends[-1] != 1.0:
            raise ValueError(f"blend: `until` must rise from phase to phase and end at 1.0, not {ends}")
        if not (self.stdlib.enabled or self.tasks.num_tasks or self.sources):
            raise ValueError("no source of documents: stdlib.enabled is false, tasks.num_tasks is 0, sources is empty")
        return self

    @model_validator(mode="after")
    def _weights_leave_room(self) -> Self:
        there = {"stdlib_code": self.stdlib.enabled, "stdlib_docs": self.stdlib.enabled, "tasks": self.tasks.num_tasks}
        for phase in self.blend:
            added = {f"sources.{i}.weight": s for i, s in enumerate(self.sources) if s.name not in phase.weights}
            total = round(sum(source.weight for source in added.values()), 9)
            others = sorted(name for name, weight in phase.weights.items() if weight > 0 and there.get(name, True))
            if total > 1 or (total == 1 and others):
                limit = f"below 1, to leave a share to {', '.join(others)}" if others else "at most 1"
                weights = " + ".join(f"{source.weight:g}" for source in added.values())
                said = f"{weights} = {total:g}" if len(added) > 1 else weights
                raise ValueError(f"{' + '.join(added)} = {said} in blend phase {phase.name!r}: must be {limit}")
        return self
