"""Every knob of `distil_modelopt.py`: those of a pretraining on Megatron-Bridge, and who learns from whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas.group import MODEL, Group
from nemotron.kit.schemas.megatron import PretrainRunConfig
from nemotron.recipes.nano3.stage0_pretrain.megatron_schema import PretrainConfig


class DistilRunConfig(PretrainRunConfig):
    """Identity, what is read, what is written."""

    model: Annotated[str, MODEL] = Field(description="the pruned model, a Megatron checkpoint: name or name:version")
    teacher: Annotated[str, MODEL] = Field(description="the large model, in Hugging Face layout: name or name:version")


class DistillationConfig(Group):
    """Who learns from whom."""

    student_path: Path = Field(description="folder of the pruned checkpoint")
    teacher_path: Path = Field(description="folder of the large model")
    logit_kl_temperature: float = Field(gt=0, description="divides the logits of both")


class DistilConfig(PretrainConfig):
    """`nemotron nano2 compress distil` at the published size."""

    run: DistilRunConfig
    distillation: DistillationConfig
