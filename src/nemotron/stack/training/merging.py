"""Weights of several steps merged into those of a run whose learning rate decayed, without that run.

At a constant rate checkpoint i is w_i = w_{i-1} + u_i, where u_i is what the updates of one interval did. Had the rate
decayed, each update would have been smaller by a factor, m_i on average over the interval (weight decay included, which
AdamW multiplies with the rate). With the same gradients, that run ends with

    w_0 + sum_i m_i u_i = (1 - m_1) w_0 + (m_1 - m_2) w_1 + ... + (m_{n-1} - m_n) w_{n-1} + m_n w_n

so a decay is a mean of checkpoints whose weights are the falls of the rate (WSM, arXiv 2507.17634; Nemotron 3 Super,
arXiv 2604.12374, merges with those of minus-sqrt). Left out is that gradients would have been others on the way.

Next: `recipes/super3/stage0_pretrain/merge.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.training.distributed import Ranks
from nemotron.stack.training.optim import lr_at
from nemotron.stack.training.sharding import whole_weights

RETAINED = "retained"  # folder in a published model: STEP.safetensors, the weights after so many steps


def merge_weights(num_intervals: int, steps_per_interval: int, style: str, final: float) -> list[float]:
    """What each of num_intervals + 1 checkpoints counts, oldest first, to emulate a decay over all intervals. Sum: 1.

    Args:
        style: of the decay, a `lr_wsd_decay_style`.
        final: the rate at its end, as a part of the constant one.
    """
    num_steps = num_intervals * steps_per_interval
    optimizer = OptimizerConfig(lr=1.0, min_lr=final, adam_beta2=0.95, weight_decay=0.0)
    scheduler = SchedulerConfig.model_validate(
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": num_steps, "lr_wsd_decay_style": style}
    )
    rates = [lr_at(step, num_steps, optimizer, scheduler) for step in range(num_steps)]
    means = [
        sum(rates[i : i + steps_per_interval]) / steps_per_interval for i in range(0, num_steps, steps_per_interval)
    ]
    return [before - after for before, after in zip([1.0, *means], [*means, 0.0], strict=True)]


def merge(states: Iterable[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """The weighted mean of state dicts, added up in float64. ValueError: not as many as `weights`, or other tensors.

    Buffers are averaged, too: the expert bias, whose update does not go by the rate, is that of the mean step.
    """
    sums: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, weight in zip(states, weights, strict=True):
        if sums and sums.keys() != state.keys():
            raise ValueError(f"tensors of one state only: {sorted(sums.keys() ^ state.keys())[:3]}")
        for name, tensor in state.items():
            dtypes[name] = tensor.dtype
            scaled = tensor.double() * weight
            sums[name] = sums[name].add_(scaled) if name in sums else scaled
    return {name: tensor.to(dtypes[name]) for name, tensor in sums.items()}


def retain_weights(folder: Path, step: int, model: NemotronH, ranks: Ranks) -> None:
    """Keep the weights after `step` steps in the folder of a model that is to be published. All ranks call it.

    A run that goes on writes those of steps that it does again, with the same content.
    """
    weights = whole_weights(model, ranks)
    if ranks.is_main:
        (folder / RETAINED).mkdir(parents=True, exist_ok=True)
        aside = folder / RETAINED / f".{step:08d}"
        save_file(weights, aside)
        aside.rename(folder / RETAINED / f"{step:08d}.safetensors")


def retained_steps(folder: Path) -> dict[int, Path]:
    """The files of `retain_weights` in a published model, by step, rising. UserError: there are none."""
    files = sorted((folder / RETAINED).glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no weights of earlier steps in it",
            "checkpoint.save_retain_interval in the run that makes the model keeps them",
        )
    return {int(file.stem): file for file in files}


def read_states(files: Iterable[Path]) -> Iterable[dict[str, torch.Tensor]]:
    """State dicts, one in memory at a time."""
    return (load_file(file) for file in files)
