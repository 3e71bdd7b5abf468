"""Every knob of `dpo.py`: type, default, unit, allowed range, and where the default comes from.

"tech report" is arXiv 2512.20848 (Nemotron 3 Nano), appendix C. Group and field names are NeMo-RL's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import rl, training
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import MODEL, PREFERENCES, Group, ModelRunConfig, Seed
from nemotron.recipes.nano3.stage2_rl.schema import CheckpointConfig, DataConfig


class DPOConfig(rl.DPOLossConfig):
    """The algorithm; beta and the weights of both terms are those of the tech report."""

    max_num_steps: int = Field(50, ge=1, description="optimiser steps (tech report)")
    val_period: int = Field(25, ge=0, description="steps between validations, the last step included; 0: none")
    val_pairs: int = Field(256, ge=1, description="validation pairs, at most, the first ones")


class PolicyConfig(rl.TrainedPolicyConfig):
    """The model being trained, as in RL with verifiable rewards; the learning rate is also the tech report's."""

    max_total_sequence_length: int = Field(
        49_152, ge=4, description="tokens of a packed row; a pair, its prompt counted twice, that is longer is left out"
    )
    train_global_batch_size: int = Field(128, ge=1, description="pairs a step, over all ranks (tech report)")
    moe_router_bias_update_rate: float = Field(
        0.0, ge=0, description="step of the expert bias towards equal loads; 0: the model chooses experts as before"
    )


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model to train, which is also the reference: name, name:version, directory or hf://ORG/NAME"
    )
    data: Annotated[str, PREFERENCES] = Field(description="pairs to train on: Preferences, as name or name:version")


class DPORunConfig(Group):
    """`nemotron nano3 rl dpo`."""

    neutral_keys: ClassVar = training.NEUTRAL_KEYS

    run: RunConfig
    dpo: DPOConfig = Field(default_factory=DPOConfig)
    policy: PolicyConfig
    data: DataConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logger: training.TrackersConfig = Field(default_factory=training.TrackersConfig)
    seed: Seed = Field(42, description="of the order of the pairs")
    mixed_precision: training.MixedPrecision = "bf16_mixed"
    resume: training.Resume = None

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.dpo.preference_loss_weight and not self.dpo.sft_loss_weight:
            raise ValueError("dpo.preference_loss_weight and dpo.sft_loss_weight are both 0: nothing to learn")
        return self

    def check_machines(self, nodes: int, processes_per_node: int, _launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where a step does not divide among its processes."""
        training.check_divides(
            "policy.train_global_batch_size", self.policy.train_global_batch_size, nodes * processes_per_node
        )
        return []
