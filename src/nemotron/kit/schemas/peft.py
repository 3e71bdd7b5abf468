"""Parameter-efficient fine-tuning: group and field names, and their defaults, are those of Megatron-Bridge."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemotron.kit.schemas.group import Group

PeftModule = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]


class PeftConfig(Group):
    """Adapters on frozen weights."""

    peft_scheme: Literal["lora"] | None = Field(
        None, description="lora: low-rank adapters on frozen weights; null: all weights are trained"
    )
    dim: int = Field(32, ge=1, description="rank of an adapter")
    alpha: float = Field(32, gt=0, description="an adapter counts alpha / dim")
    target_modules: list[PeftModule] = Field(
        ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"],
        min_length=1,
        description="matrices with an adapter: attention's, the shared expert's and the MLP's, Mamba's; routed experts "
        "have none (published recipes of Nemotron 3)",
    )
