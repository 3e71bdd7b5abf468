"""What every group of config keys is, and the `run` group."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Scale = Literal["tiny", "small", "medium", "full"]


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class RunConfig(Group):
    """Identity of a run. A stage adds the artifacts that it reads and writes, each under a key of its own."""

    config: str = Field("", description="name of this config; filled in from its file")
    script: str = Field("", description="the script that this config is for; filled in")


class ModelRunConfig(RunConfig):
    """A run that trains a model and measures it."""

    output: str | None = Field(None, description="name under which the model is published")
    results: str | None = Field(None, description="name under which the results are published")
