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

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator

Family = Literal["math", "multiple_choice", "instruction_following", "structured_output"]


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class RunConfig(Group):
    """Names of what is written."""

    script: Literal["data_prep.py"] = Field("data_prep.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: prompts with their tasks")


class MathDifficulty(Group):
    """Integer arithmetic. All `…Difficulty` groups have the fields and defaults of nemotron.stack.environments."""

    min_digits: int = Field(2, ge=1, le=6, description="fewest digits of an operand")
    max_digits: int = Field(3, ge=1, le=6, description="most digits of an operand of + and -")
    multiply_digits: int = Field(2, ge=1, le=6, description="most digits of the number that is multiplied by 2..9")
    add: float = Field(0.5, ge=0, description="relative frequency of additions")
    subtract: float = Field(0.5, ge=0, description="relative frequency of subtractions")
    multiply: float = Field(0.0, ge=0, description="relative frequency of multiplications")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that work digit by digit")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_digits > min(self.max_digits, self.multiply_digits):
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits or multiply_digits")
        if self.add + self.subtract + self.multiply <= 0:
            raise ValueError("one of add, subtract and multiply must be above 0")
        return self


class MultipleChoiceDifficulty(Group):
    """Lettered options, one of them right."""

    kinds: list[Literal["largest", "smallest", "starts_with", "ends_with", "category", "odd_one_out"]] = Field(
        ["largest", "smallest", "category"], min_length=1, description="kinds of question, equally frequent"
    )
    num_options: int = Field(4, ge=3, le=6, description="options of a question")
    min_digits: int = Field(2, ge=1, le=9, description="fewest digits of the numbers compared")
    max_digits: int = Field(2, ge=1, le=9, description="most digits of the numbers compared")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that go through all options")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits {self.max_digits}")
        if "odd_one_out" in self.kinds and self.words_per_category < self.num_options - 1:
            raise ValueError("odd_one_out needs words_per_category >= num_options - 1")
        return self


class InstructionFollowingDifficulty(Group):
    """Words written under constraints."""

    kinds: list[Literal["repeat", "pick", "pick_not", "reorder", "first_last", "upper"]] = Field(
        ["repeat", "pick", "pick_not", "reorder", "first_last", "upper"],
        min_length=1,
        description="kinds of instruction, equally frequent",
    )
    min_times: int = Field(2, ge=1, le=9, description="fewest repetitions of a word")
    max_times: int = Field(3, ge=1, le=9, description="most repetitions of a word")
    num_given: int = Field(4, ge=4, le=8, description="words given to pick from")
    num_reorder: int = Field(3, ge=3, le=8, description="words to reorder")
    max_count: int = Field(4, ge=3, le=8, description="longest list of different words asked for; the shortest is 3")
    num_upper: int = Field(2, ge=1, le=4, description="words to write in upper case")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    in_order_share: float = Field(0.75, ge=0, le=1, description="share of demonstrations in the order of the prompt")
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that number the words first")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_times > self.max_times:
            raise ValueError(f"min_times {self.min_times} exceeds max_times {self.max_times}")
        return self


class StructuredOutputDifficulty(Group):
    """JSON objects that validate under a small schema."""

    min_keys: int = Field(2, ge=1, le=6, description="fewest keys of an object")
    max_keys: int = Field(3, ge=1, le=6, description="most keys of an object")
    max_number: int = Field(99, ge=2, le=1_000_000_000, description="largest number; the smallest is 1")
    numbers_as_strings: bool = Field(True, description="a number may be asked for as a string")
    flags: bool = Field(True, description="boolean keys occur")
    choices: bool = Field(True, description="enumerated keys occur")
    words_per_category: int = Field(8, ge=2, le=16, description="values of a key that holds a word")
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that write typed values first")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_keys > self.max_keys:
            raise ValueError(f"min_keys {self.min_keys} exceeds max_keys {self.max_keys}")
        return self


class DifficultyConfig(Group):
    """How hard the tasks of each family are; a family left out has its defaults."""

    math: MathDifficulty | None = Field(None, description="integer arithmetic")
    multiple_choice: MultipleChoiceDifficulty | None = Field(None, description="lettered options")
    instruction_following: InstructionFollowingDifficulty | None = Field(None, description="words under constraints")
    structured_output: StructuredOutputDifficulty | None = Field(None, description="JSON under a schema")

    def get(self, family: str) -> dict[str, Any] | None:
        """The fields of one family; None where its defaults are to be used."""
        given: dict[str, dict[str, Any]] = self.model_dump()
        return given.get(family)

    @model_serializer
    def _only_given(self) -> dict[str, dict[str, Any]]:
        # So that a config that leaves all of this out stays as short as it was written.
        return {name: group.model_dump() for name, group in self if group is not None}


class TasksConfig(Group):
    """Prompts from the environments' generators."""

    families: list[Family] = Field(
        ["math", "multiple_choice", "instruction_following", "structured_output"], description="which; [] for none"
    )
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
