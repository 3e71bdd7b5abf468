"""AdamW and the learning rate over time. Keys are Megatron-Bridge's; so are the ranges that it states."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nemotron.kit.schemas.group import Group


class AdamWConfig(Group):
    """AdamW; defaults are those of PyTorch where all families keep them."""

    lr: float = Field(gt=0, description="peak learning rate")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(ge=0, description="decoupled; not on norms, biases, A_log, D, dt_bias")


class OptimizerConfig(AdamWConfig):
    """AdamW with a schedule that ends at `min_lr`."""

    min_lr: float = Field(ge=0, description="learning rate at the end of the decay; at most lr")
    clip_grad: float = Field(1.0, gt=0, description="largest norm of all gradients together")


class SchedulerConfig(Group):
    """Learning rate over time: linear warm-up, then a shape."""

    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warm-up")
    lr_decay_style: Literal["WSD", "cosine", "constant"] = Field("WSD", description="shape after the warm-up")
    lr_wsd_decay_iters: int = Field(0, ge=0, description="steps of the final decay of WSD; 0: it stays at lr")
    lr_wsd_decay_style: Literal["linear", "minus_sqrt", "cosine"] = Field("linear", description="shape of that decay")
