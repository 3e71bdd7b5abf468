"""Every knob of this stage's `data_prep.py`. Imports only the standard library and pydantic, so that it loads anywhere.

"tech report" is arXiv 2512.20848 (Nemotron 3 Nano).
"""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Family = Literal["math", "multiple_choice", "instruction_following", "structured_output"]


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class RunConfig(Group):
    """Names of what is written."""

    script: Literal["data_prep.py"] = Field("data_prep.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: prompts with their tasks")


class TasksConfig(Group):
    """Prompts from the environments' generators."""

    families: list[Family] = Field(
        ["math", "multiple_choice", "instruction_following", "structured_output"], description="which; [] for none"
    )
    num_tasks: int = Field(200_000, ge=1, description="different prompts of each family, at most, at scale full")
    num_valid_tasks: int = Field(10_000, ge=1, description="different validation prompts of each family, as above")
    seed: int = Field(3, ge=0, description="of the generators; the split goes by the task, not by this")
    difficulty: dict[Family, dict[str, Any]] = Field({}, description="per family: fields of its difficulty class")


class SourceConfig(Group):
    """Task records of your own: JSONL of `Task.to_dict()`; family, prompt, canonical, spec and solution."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="its name in the table of what was kept")
    paths: list[str] = Field(min_length=1, description="files or globs: .jsonl")
    max_tasks: int = Field(1_000_000, ge=1, description="records read at most, at scale full")
    state: str = Field("", description="digest over the files' sizes and times of change, filled in")

    @field_validator("paths")
    @classmethod
    def _files_exist(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if not glob.glob(str(Path(path).expanduser()), recursive=True):  # noqa: PTH207  takes absolute patterns too
                raise ValueError(f"no such file: {path}" if not glob.has_magic(path) else f"no file matches {path}")
        return paths

    @model_validator(mode="after")
    def _note_state(self) -> Self:
        # Changed files make another run, although the config reads the same.
        state = hashlib.sha256()
        patterns = [str(Path(path).expanduser()) for path in self.paths]
        for name in sorted({n for pattern in patterns for n in glob.glob(pattern, recursive=True)}):  # noqa: PTH207
            status = Path(name).stat()
            state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        self.state = state.hexdigest()[:16]
        return self


class RLDataConfig(Group):
    """`nemotron nano3 data prep rl`."""

    run: RunConfig
    scale: Literal["tiny", "small", "medium", "full"] = Field("full", description="share of the counts below to use")
    seed: int = Field(1234, ge=0, description="of the order of the prompts")
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sources: list[SourceConfig] = Field([], description="your own task records")

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.tasks.families and not self.sources:
            raise ValueError("no prompts: tasks.families and sources are both empty")
        names = [source.name for source in self.sources] + list(self.tasks.families)
        if len(names) != len(set(names)):
            raise ValueError(f"sources: two sources of one name among {', '.join(sorted(names))}")
        return self
