"""Every knob of this stage's `data_prep.py`. Imports only the standard library and pydantic, so that it loads anywhere.

"tech report" is arXiv 2512.20848 (Nemotron 3 Nano).
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemotron.kit.schemas.difficulty import FAMILIES, DifficultyConfig, Family
from nemotron.kit.schemas.group import Group


class RunConfig(Group):
    """Names of what is written."""

    script: Literal["data_prep.py"] = Field("data_prep.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: prompts with their tasks")


class TasksConfig(Group):
    """Prompts from the environments' generators."""

    families: list[Family] = Field(list(FAMILIES), description="which; [] for none")
    num_tasks: int = Field(200_000, ge=1, description="different prompts of each family, at most, at scale full")
    num_valid_tasks: int = Field(10_000, ge=1, description="different validation prompts of each family, as above")
    seed: int = Field(3, ge=0, description="of the generators; the split goes by the task, not by this")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )


class SourceConfig(Group):
    """Task records of your own, as `Task.to_dict()`: family, prompt, canonical, spec and solution."""

    other_names: ClassVar[dict[str, str]] = {"locations": "paths", "path": "paths"}

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="its name in the table of what was kept")
    paths: list[str] = Field(
        min_length=1, description="files, globs, folders, addresses: JSONL (.gz, .zst), Parquet, Arrow"
    )
    columns: dict[str, str] = Field(
        {}, description="family, prompt, canonical, spec, solution -> its name in the files"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="at a record or file that cannot be read: stop and name it, or skip and count it"
    )
    max_tasks: int | None = Field(
        None, ge=1, description="records read at most, the first ones, at every scale; null: all"
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


class RLDataConfig(Group):
    """`nemotron nano3 data prep rl`."""

    run: RunConfig
    scale: Literal["tiny", "small", "medium", "full"] = Field(
        "full", description="share of the generated counts to use"
    )
    seed: int = Field(1234, ge=0, description="of the order of the prompts")
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sources: list[SourceConfig] = Field([], description="your own task records; a path alone is a source, too")
    evaluation_tasks: int = Field(500, ge=0, description="tasks a family whose prompts no source may contain")

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.tasks.families and not self.sources:
            raise ValueError("no prompts: tasks.families and sources are both empty")
        names = [source.name for source in self.sources] + list(self.tasks.families)
        if len(names) != len(set(names)):
            raise ValueError(f"sources: two sources of one name among {', '.join(sorted(names))}")
        return self
