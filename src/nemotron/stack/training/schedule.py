"""Learning rate as a pure function of the step: WSD, cosine and constant, each after a linear warm-up.

Field names and shapes are Megatron's (`lr_decay_style`, `lr_wsd_decay_iters`, `lr_wsd_decay_style`). One difference:
here step 0 already has 1/warm-up of the peak, where Megatron gives the first step a rate of zero and so wastes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["WSD", "cosine", "constant"]
WsdDecayStyle = Literal["linear", "minus_sqrt", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """What `lr_at` needs. `lr` is the peak, `min_lr` the floor reached by the last step; counts are optimiser steps.

    WSD (warm-up, stable, decay): the peak is held until the last `lr_wsd_decay_iters` steps. Nano 3 decays linearly
    over the last 20 %; Super 3 with minus_sqrt. Raises ValueError where the parts do not fit into `train_iters`.
    """

    lr: float
    min_lr: float
    train_iters: int
    lr_warmup_iters: int = 0
    lr_decay_style: DecayStyle = "WSD"
    lr_wsd_decay_iters: int = 0
    lr_wsd_decay_style: WsdDecayStyle = "linear"

    def __post_init__(self) -> None:
        if self.train_iters < 1:
            raise ValueError(f"train_iters is {self.train_iters}, must be at least 1")
        if not 0.0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr {self.min_lr} must lie between 0 and lr {self.lr}")
        decay = self.lr_wsd_decay_iters if self.lr_decay_style == "WSD" else 0
        if min(self.lr_warmup_iters, decay) < 0 or self.lr_warmup_iters + decay > self.train_iters:
            raise ValueError(
                f"lr_warmup_iters {self.lr_warmup_iters} + lr_wsd_decay_iters {decay} do not fit into "
                f"train_iters {self.train_iters}"
            )
        if self.lr_decay_style not in ("WSD", "cosine", "constant"):
            raise ValueError(f"unknown lr_decay_style {self.lr_decay_style!r}: WSD, cosine or constant")
        if self.lr_wsd_decay_style not in ("linear", "minus_sqrt", "cosine"):
            raise ValueError(f"unknown lr_wsd_decay_style {self.lr_wsd_decay_style!r}: linear, minus_sqrt or cosine")


def lr_at(step: int, schedule: Schedule) -> float:
    """Learning rate of optimiser step `step`, counted from 0. Steps past `train_iters` keep the last value."""
    done = min(step + 1, schedule.train_iters)  # 1-based, so that the last step lands on min_lr exactly
    if done <= schedule.lr_warmup_iters:
        return schedule.lr * done / schedule.lr_warmup_iters
    if schedule.lr_decay_style == "constant":
        return schedule.lr
    if schedule.lr_decay_style == "cosine":
        start, length, shape = schedule.lr_warmup_iters, schedule.train_iters - schedule.lr_warmup_iters, "cosine"
    else:
        start = schedule.train_iters - schedule.lr_wsd_decay_iters
        length, shape = schedule.lr_wsd_decay_iters, schedule.lr_wsd_decay_style
    if done <= start:
        return schedule.lr
    ratio = (done - start) / length  # in (0, 1]
    if shape == "linear":
        kept = 1.0 - ratio
    elif shape == "minus_sqrt":
        kept = 1.0 - math.sqrt(ratio)
    else:
        kept = 0.5 * (1.0 + math.cos(math.pi * ratio))
    return schedule.min_lr + kept * (schedule.lr - schedule.min_lr)
