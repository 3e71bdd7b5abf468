"""Every knob of `data_prep_blend.py`. Imports only the standard library and pydantic, so that it loads anywhere.

A config is checked without a look at the network: local files have to exist, what stands behind an address is found out
when the run begins.
"""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _check_location(location: str) -> str:
    if "://" not in location and not _local_files(location):
        raise ValueError(f"no file matches {location}" if glob.has_magic(location) else f"no such file: {location}")
    return location


def _local_files(location: str) -> set[str]:
    """What a path or glob of this machine stands for, with all that lies below a folder."""
    path = Path(location).expanduser()
    found = set(glob.glob(str(path), recursive=True))  # noqa: PTH207  takes absolute patterns too
    found |= {str(path)} if path.exists() else set()  # brackets may be its name
    for folder in [name for name in found if Path(name).is_dir()]:
        found |= {os.path.join(base, name) for base, _, names in os.walk(folder) for name in names}  # noqa: PTH118
    return found


Location = Annotated[str, AfterValidator(_check_location)]


class RunConfig(Group):
    """Names of what is written."""

    script: Literal["data_prep_blend.py"] = Field(
        "data_prep_blend.py", description="the script that this config is for"
    )
    config: str = Field("", description="name of this config; filled in")
    output: str = Field(description="artifact written: prompts as NeMo Gym reads them")


class ReferenceConfig(Group):
    """A collection that placeholders point to. What is left out is, for the published collections, what they need."""

    location: Location = Field(description="where it is: file, glob, folder or address; @COMMIT behind hf:// pins it")
    before: str | None = Field(None, description="text before each of its questions, taken off")
    after: str | None = Field(None, description="text behind each of its questions, taken off")
    answers_in_list: bool | None = Field(None, description="an answer is a JSON list, and its first element counts")

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if bool(self.before) != bool(self.after):
            raise ValueError("before and after are given together")
        return self


class BlendConfig(Group):
    """`nemotron nano3 data prep rl -c published`."""

    run: RunConfig
    source: list[Location] = Field(
        min_length=1, description="the blend: files, globs, folders, addresses: JSONL (.gz, .zst), Parquet, Arrow"
    )
    references: dict[str, ReferenceConfig] = Field(
        {}, description="what records write in `dataset` -> the collection; besides those of the published blends"
    )
    valid_rows: int = Field(
        0, ge=0, description="so many records, the last of the blend, are for validation; or valid_fraction"
    )
    valid_fraction: float = Field(
        0.0, ge=0, lt=1, description="share of the prompts that is for validation, by their hash; or valid_rows"
    )
    seed: int = Field(1234, ge=0, description="of the hash of valid_fraction")
    check_fields: bool = Field(
        True, description="check what the known resources servers ask for; false: only prompt and agent"
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="at a record that cannot be read, filled in or used: stop and name it, or skip and count it"
    )
    max_record_bytes: int = Field(32 * 2**20, ge=1024, description="bytes; a longer record is an error")
    shard_bytes: int = Field(32 * 2**20, ge=1024, description="bytes of the blend that one task reads, about")
    state: str = Field("", description="digest over the local files' sizes and times of change, filled in")

    @model_validator(mode="after")
    def _one_split(self) -> Self:
        if (self.valid_rows > 0) == (self.valid_fraction > 0):
            raise ValueError(
                "what is held out for validation: give one of valid_rows and valid_fraction"
                + (", and set the other to 0" if self.valid_rows else "")
            )
        return self

    @model_validator(mode="after")
    def _note_state(self) -> Self:
        # Changed files make another run, although the config reads the same. What is elsewhere is not asked here.
        state = hashlib.sha256()
        locations = [*self.source, *(reference.location for reference in self.references.values())]
        for name in sorted(
            {name for location in locations if "://" not in location for name in _local_files(location)}
        ):
            status = os.lstat(name)
            state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        self.state = state.hexdigest()[:16]
        return self
