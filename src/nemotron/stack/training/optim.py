"""AdamW with the parameter groups of the published recipes, and its learning rate as a pure function of the step.

Schedules are WSD, cosine and constant, each after a linear warm-up; names and shapes are Megatron's (`lr_decay_style`,
`lr_wsd_decay_iters`, `lr_wsd_decay_style`). One difference: here step 0 already has 1/warm-up of the peak, where
Megatron gives the first step a rate of zero and so wastes it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from nemotron.kit.schemas.optimizer import AdamWConfig, OptimizerConfig, SchedulerConfig

# Mamba-2's own parameters: the log decay rate, the skip gain and the step-size bias. Pulling them towards zero would
# change time constants, not regularise; Megatron-Core marks A_log, D and dt_bias `_no_weight_decay` for that reason.
NO_DECAY_NAMES = frozenset({"A_log", "D", "dt_bias"})


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to the parameter `name` (a dotted path).

    Matrices, expert stacks, convolution kernels and embeddings decay. Norm weights, biases, A_log, D, dt_bias and
    whatever else is 1-D or a scalar do not.
    """
    leaf = name.rsplit(".", 1)[-1]
    return parameter.ndim >= 2 and leaf != "bias" and leaf not in NO_DECAY_NAMES


def build_optimizer(model: nn.Module, settings: AdamWConfig) -> torch.optim.AdamW:
    """AdamW (decoupled decay) over the parameters of `model` that require gradients, in two groups.

    `settings.lr` is only the first value; a loop sets the scheduled one with `set_lr` before each step. The fused
    kernel runs on CPU and CUDA alike and is elementwise, hence as repeatable as the plain one. Raises ValueError if
    nothing is trainable.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter")
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    betas = settings.adam_beta1, settings.adam_beta2
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(step: int, train_iters: int, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> float:
    """Learning rate of optimiser step `step`, counted from 0, of `train_iters`. Later steps keep the last value.

    WSD (warm-up, stable, decay): the peak is held until the last `lr_wsd_decay_iters` steps. Nano 3 decays linearly
    over the last 20 %; Super 3 with minus_sqrt. The last step of a decay has `min_lr`.
    """
    position = min(step + 1, train_iters)  # 1-based, so that the last step lands on min_lr exactly
    if position <= scheduler.lr_warmup_iters:
        return optimizer.lr * position / scheduler.lr_warmup_iters
    if scheduler.lr_decay_style == "constant":
        return optimizer.lr
    if scheduler.lr_decay_style == "cosine":
        start, length, shape = scheduler.lr_warmup_iters, train_iters - scheduler.lr_warmup_iters, "cosine"
    else:
        start = train_iters - scheduler.lr_wsd_decay_iters
        length, shape = scheduler.lr_wsd_decay_iters, scheduler.lr_wsd_decay_style
    if position <= start:
        return optimizer.lr
    ratio = (position - start) / length  # in (0, 1]
    if shape == "linear":
        kept = 1.0 - ratio
    elif shape == "minus_sqrt":
        kept = 1.0 - math.sqrt(ratio)
    else:
        kept = 0.5 * (1.0 + math.cos(math.pi * ratio))
    return optimizer.min_lr + kept * (optimizer.lr - optimizer.min_lr)
