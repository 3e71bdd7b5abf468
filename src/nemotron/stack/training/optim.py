"""AdamW with the parameter groups of the published recipes."""

from __future__ import annotations

import torch
from torch import nn

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


def build_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.AdamW:
    """AdamW (decoupled decay) over the parameters of `model` that require gradients, in two groups.

    Defaults are Nano 3's: beta 0.9/0.95, decay 0.1 (tech report section 2.3). `lr` is only the first value; a loop
    sets the scheduled one with `set_lr` before each step. The fused kernel runs on CPU and CUDA alike and is
    elementwise, hence as repeatable as the plain one. Raises ValueError if nothing is trainable.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("the model has no trainable parameter")
    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
