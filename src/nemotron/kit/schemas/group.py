"""What every group of config keys is, and the `run` group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from nemo_runspec.config.inputs import ArtifactInput, FieldOfArtifact
from nemo_runspec.user_files import UserFiles

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Registry, Version


def _adopt_model(place: str, registry: Registry, publish: bool) -> Version | None:
    from nemotron.kit.model_folder import adopt_model  # only where a model is given by its place

    return adopt_model(place, registry, publish)


# Marks of the keys of `run`: a model by name, directory or hf:// address, or data of one kind by name.
MODEL = ArtifactInput("Checkpoint", _adopt_model)
PRETRAIN_BLEND = ArtifactInput("PretrainBlend")
SFT_PACK = ArtifactInput("SFTPack")
RL_PROMPTS = ArtifactInput("RLPrompts")
PREFERENCES = ArtifactInput("Preferences")


# A model by its place, under the key that the library which does the same at scale has for it; the same as `run.model`.
ModelPath: TypeAlias = Annotated[
    Path,
    FieldOfArtifact("path", input="model"),
    Field(description="model to go on from: takes what `run.model` takes, and is then that"),
]

Scale = Literal["tiny", "small", "medium", "full"]
# The user's own file or folder: it has to exist, and what is in it is part of a run's identity.
UserPath: TypeAlias = Annotated[Path, UserFiles()]
# What every generator of random numbers takes, an offset for a rank or an epoch included.
Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Group(BaseModel):
    """A group of keys; an unknown key is an error, and so is a number that is infinite or none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class RunConfig(Group):
    """Identity of a run. A stage adds the artifacts that it reads and writes, each under a key of its own."""

    config: str = Field("", description="name of this config; filled in from its file")
    script: str = Field("", description="the script that this config is for; filled in")


class ModelRunConfig(RunConfig):
    """A run that trains a model and measures it."""

    output: str | None = Field(None, description="name under which the model is published")
    results: str | None = Field(None, description="name under which the results are published")
