"""Every knob of `train_nemo_rl.py` and `dpo_nemo_rl.py`. The keys are NeMo-RL's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas.group import MODEL, PREFERENCES, RL_PROMPTS
from nemotron.kit.schemas.nemo_rl import DPOMasterConfig, GRPOMasterConfig, NemoRLRunConfig


class RLRunConfig(NemoRLRunConfig):
    """Of GRPO, which reads prompts."""

    model: Annotated[str | None, MODEL] = Field(
        None,
        description="checkpoint to begin with, as name or name:version; checkpointing.pretrained_checkpoint has it",
    )
    data: Annotated[str, RL_PROMPTS] = Field(description="records of NeMo Gym: RLPrompts, as name or name:version")


class RLConfig(GRPOMasterConfig):
    """`nemotron nano3 rl rlvr` and `rl rlhf`, and those of super3, at the published size."""

    run: RLRunConfig


class PreferencesRunConfig(NemoRLRunConfig):
    """Of DPO, which reads pairs."""

    model: Annotated[str | None, MODEL] = Field(
        None,
        description="checkpoint to begin with, as name or name:version; checkpointing.pretrained_checkpoint has it",
    )
    data: Annotated[str, PREFERENCES] = Field(description="pairs to train on: Preferences, as name or name:version")


class DPOConfig(DPOMasterConfig):
    """`nemotron nano3 rl dpo` at the published size."""

    run: PreferencesRunConfig
