"""Every knob of `mtp_healing.py`: type, default, unit, allowed range, and where the default comes from.

Nemotron 3 Super states that it heals multi-token prediction after RL, and no number of it. Defaults are those that
Nemotron 3 Ultra states for its "MTP boosting" (its tech report); what it does not state has no default here. Group and
field names are NeMo-RL's, that of the number of drafts is vLLM's.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import rl, training
from nemotron.kit.schemas.group import MODEL, RL_PROMPTS, Group, ModelRunConfig, Seed
from nemotron.recipes.nano3.stage2_rl.schema import CheckpointConfig, DataConfig


class BoostingConfig(Group):
    """The algorithm."""

    max_num_steps: int = Field(12_000, ge=1, description="optimiser steps (Ultra)")
    num_prompts_per_step: int = Field(
        64, ge=1, description="prompts a step over all ranks, one response each (Ultra: global batch size)"
    )
    mtp_num_layers: int = Field(7, ge=1, description="applications of the block to each token (Ultra)")
    temperature: float = Field(
        2.0, gt=0, description="of both distributions in the KL, which is multiplied by its square (Ultra)"
    )
    num_speculative_tokens: int = Field(3, ge=1, description="drafts a round where the acceptance length is measured")
    val_period: int = Field(
        0, ge=0, description="steps between measurements; 0: the first model and the last alone, as always"
    )
    val_prompts_per_family: int = Field(
        64, ge=1, description="validation prompts of each family that it is measured on"
    )


class OptimizerConfig(rl.OptimizerConfig):
    """AdamW with RL's values, but for the learning rate."""

    lr: float = Field(gt=0, description="constant after the warm-up")


class GenerationConfig(rl.GenerationConfig):
    """How responses are drawn: from the model as it is, temperature 1 and every token (Ultra)."""

    max_new_tokens: int = Field(ge=1, description="longest response, tokens")


class PolicyConfig(rl.TrainedPolicyConfig):
    """The model whose multi-token prediction is trained, and nothing else of it."""

    max_total_sequence_length: int = Field(
        8_192, ge=3, description="tokens of a prompt and its response, and of a row they are packed into (Ultra)"
    )
    freeze_moe_router: bool = Field(False, description="router weights of the block stay as they are")
    moe_router_bias_update_rate: float = Field(
        1e-3, ge=0, description="step of the expert bias of the block towards equal loads, as in RL"
    )
    optimizer: OptimizerConfig
    generation: GenerationConfig


class EnvConfig(Group):
    """How prompts are shown."""

    enable_thinking: bool = Field(True, description="generation prompt with reasoning on")


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model with multi-token prediction: name, name:version, directory or hf://ORG/NAME"
    )
    data: Annotated[str, RL_PROMPTS] = Field(description="its prompts: RLPrompts, as name or name:version")


class MTPHealingConfig(Group):
    """`nemotron super3 rl mtp-healing`."""

    neutral_keys: ClassVar = training.NEUTRAL_KEYS

    run: RunConfig
    boosting: BoostingConfig = Field(default_factory=BoostingConfig)
    policy: PolicyConfig
    env: EnvConfig = Field(default_factory=EnvConfig)
    data: DataConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logger: training.TrackersConfig = Field(default_factory=training.TrackersConfig)
    seed: Seed = Field(42, description="of the prompt order, of sampling, and of what steps go on from")
    mixed_precision: training.MixedPrecision = "bf16_mixed"
    resume: training.Resume = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens {self.policy.generation.max_new_tokens} leaves no room for a prompt "
                f"in policy.max_total_sequence_length {self.policy.max_total_sequence_length}"
            )
        return self

    def check_machines(self, nodes: int, processes_per_node: int, _launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where a step does not divide among its processes."""
        training.check_divides(
            "boosting.num_prompts_per_step", self.boosting.num_prompts_per_step, nodes * processes_per_node
        )
        return []
