"""AutoQuantize: which layers get which format under a budget of bits, as ModelOpt's gradient search decides it.

1. Score every candidate: how much a layer in a format moves the loss. To second order, with the Fisher information in
   place of the Hessian, that is the sum over calibration tokens of (dL/dy * (y_quantised - y))^2 for its output y.
2. Make scores monotone: a format with more bits never scores worse than one with fewer.
3. Choose one format a group of layers, with the smallest sum of scores whose weights fit into the budget. ModelOpt
   hands this to an integer programming solver; here the exact optimum is found by dynamic programming over all
   combinations that no cheaper one matches (Nemhauser and Ullmann 1969).

Groups share a format because kernels fuse them or store them as one: q, k and v of an attention block; all experts of a
block, which are scored at the output of their mixer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nemotron.kit.schemas.quantization import BITS, Precision, QuantAlgo, WeightScales
from nemotron.stack.models import NemotronH
from nemotron.stack.quantization.layers import (
    Amax,
    Quantization,
    matrix,
    operands,
    quantize,
    quantized_weights,
    round_activations,
)
from nemotron.stack.quantization.nvfp4 import BLOCK

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Group:
    """Matrices that get one format, by the names of `layers.py`, and the modules at whose outputs they are scored."""

    name: str
    matrices: tuple[str, ...]
    scored_at: tuple[str, ...]


def group_matrices(names: Iterable[str]) -> list[Group]:
    """Groups of matrices of a Nemotron-H model, `….q_proj`, `….experts.up_proj`, in order.

    q, k and v of a block are a group that is scored at each of the three; the up and down projections of all experts of
    a block one that is scored at the mixer; any other matrix is a group of its own.
    """
    matrices: dict[str, list[str]] = {}
    scored_at: dict[str, list[str]] = {}
    for name in names:
        fused = re.fullmatch(r"(.*)\.[qkv]_proj", name)
        experts = re.fullmatch(r"((.*)\.experts)\.(up|down)_proj", name)
        key = f"{fused[1]}.qkv_proj" if fused else experts[1] if experts else name
        matrices.setdefault(key, []).append(name)
        scored_at.setdefault(key, []).append(experts[2] if experts else name)
    return [Group(key, tuple(matrices[key]), tuple(dict.fromkeys(scored_at[key]))) for key in matrices]


# ---- scores

Candidates = dict[str, dict[QuantAlgo, Quantization]]


def candidates(
    model: NemotronH, groups: Sequence[Group], algorithms: Sequence[QuantAlgo], amax: Amax, scales: WeightScales
) -> Candidates:
    """Every group in every format that its matrices can have, by its name; `amax` and `scales` as for `quantize`.

    NVFP4 takes an inner dimension of whole blocks. Keys and values stay as they are: their format is not chosen.
    """
    amax = Amax(amax.inputs, {})
    return {
        group.name: {
            algorithm: quantize(model, dict.fromkeys(group.matrices, algorithm), amax, scales, ssm_state="FP32")
            for algorithm in algorithms
            if algorithm == "FP8" or not any(matrix(model, name).shape[-1] % BLOCK for name in group.matrices)
        }
        for group in groups
    }


@contextmanager
def in_format(model: NemotronH, quantization: Quantization) -> Iterator[None]:
    """Inside, the matrices of the plan have their quantised values, and what they are multiplied with is rounded."""
    with quantized_weights(model, quantization):
        round_activations(model, quantization)
        try:
            yield
        finally:
            for name, module, attribute in operands(model):
                if name in quantization.input_scales:
                    setattr(module, attribute, None)


def fisher_scores(
    model: NemotronH,
    groups: Sequence[Group],
    candidates: Candidates,
    batches: Iterable[Batch],
    loss: Callable[[Batch], Tensor],
) -> dict[str, dict[QuantAlgo, float]]:
    """Score of each group in each of its formats: the sum over batches of (dL/dy * (y' - y))^2; unquantised it is 0.

    y is the output of a module at which the group is scored, y' that of the same input with the group in the format,
    all else as it is; the sum is over all of the output's values, in fp32.

    Args:
        model: unquantised, in eval mode. Gradients of its parameters are neither computed nor touched.
        batches: calibration data. loss: of a batch, through the model.
    """
    scores = {group.name: dict.fromkeys(candidates[group.name], 0.0) for group in groups}

    def watch(module: nn.Module, groups_here: list[Group]) -> torch.utils.hooks.RemovableHandle:
        def compare(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            if not torch.is_grad_enabled():  # this is a comparison of a module around this one
                return
            y = output[0] if isinstance(output, tuple) else output
            differences = []
            with torch.no_grad():
                for group in groups_here:
                    for algorithm, quantization in candidates[group.name].items():
                        with in_format(model, quantization):
                            moved = module.forward(*args)
                        moved = moved[0] if isinstance(moved, tuple) else moved
                        differences.append((scores[group.name], algorithm, moved.float() - y.float()))

            def add(gradient: Tensor) -> None:
                for scores_here, algorithm, difference in differences:
                    scores_here[algorithm] += (gradient.float() * difference).square().sum().item()

            y.register_hook(add)

        return module.register_forward_hook(compare)

    places = dict.fromkeys(name for group in groups for name in group.scored_at)
    handles = [
        watch(model.get_submodule(place), [group for group in groups if place in group.scored_at]) for place in places
    ]
    try:
        with _gradients_of_activations(model) as leaf:
            for batch in batches:
                torch.autograd.grad(loss(batch), leaf)
    finally:
        for handle in handles:
            handle.remove()
    return scores


@contextmanager
def _gradients_of_activations(model: NemotronH) -> Iterator[Tensor]:
    """Inside, the embedding alone asks for a gradient: on its way there it passes the outputs of all layers."""
    asked = {parameter: parameter.requires_grad for parameter in model.parameters()}
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield model.backbone.embeddings.weight.requires_grad_()
    finally:
        for parameter, asks in asked.items():
            parameter.requires_grad_(asks)


# ---- choice


def search(
    model: NemotronH, groups: Sequence[Group], scores: Mapping[str, Mapping[QuantAlgo, float]], effective_bits: float
) -> dict[str, QuantAlgo]:
    """The format of every matrix that gets one: smallest sum of monotone scores within the bits a weight on average.

    Each group has the choice among the formats that it has a score in, and BF16; all count towards `effective_bits`.

    Raises:
        ValueError: not even the smallest format of every group fits.
    """
    sizes = [sum(matrix(model, name).numel() for name in group.matrices) for group in groups]
    formats: list[list[Precision]] = [sorted([*scores[group.name], "BF16"], key=BITS.__getitem__) for group in groups]
    costs = [[int(size * BITS[name]) for name in names] for size, names in zip(sizes, formats, strict=True)]
    least, total = sum(map(min, costs)), sum(sizes)
    if least > effective_bits * total:
        raise ValueError(
            f"effective_bits {effective_bits}: the smallest formats take {least / total:.2f} bits a weight"
        )
    monotone = [
        make_monotone([0.0 if name == "BF16" else scores[group.name][name] for name in names])
        for group, names in zip(groups, formats, strict=True)
    ]
    plan: dict[str, QuantAlgo] = {}
    for group, names, index in zip(
        groups, formats, allocate(costs, monotone, int(effective_bits * total)), strict=True
    ):
        if (chosen := names[index]) != "BF16":
            plan |= dict.fromkeys(group.matrices, chosen)
    return plan


def make_monotone(scores: Sequence[float]) -> list[float]:
    """Scores of formats in ascending order of bits, none larger than the one before it."""
    return [min(scores[: i + 1]) for i in range(len(scores))]


def allocate(costs: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Which option to take in each row: the smallest sum of scores among those whose costs add up to `budget` or less.

    Exact. After each row only combinations are kept that have a smaller score than all cheaper ones, as any choice in
    the rows to come suits the cheaper one as well; of equal scores the cheaper is taken.

    Raises ValueError where the cheapest options exceed the budget.
    """
    to_come = np.cumsum([0, *(min(row) for row in reversed(costs))])[::-1]  # the least that the rows from i on cost
    if to_come[0] > budget:
        raise ValueError(f"the cheapest options cost {to_come[0]}, the budget is {budget}")
    cost, score = np.zeros(1, np.int64), np.zeros(1)
    taken: list[tuple[np.ndarray, np.ndarray]] = []  # of each row: option, and which combination before it
    for row, (row_costs, row_scores) in enumerate(zip(costs, scores, strict=True)):
        all_costs = np.add.outer(np.asarray(row_costs), cost)
        all_scores = np.add.outer(np.asarray(row_scores), score)
        option, before = np.nonzero(all_costs + to_come[row + 1] <= budget)
        cost, score = all_costs[option, before], all_scores[option, before]
        order = np.lexsort((score, cost))
        best_so_far = np.minimum.accumulate(score[order])
        is_better = np.diff(best_so_far, prepend=np.inf) < 0
        order = order[is_better]
        cost, score = cost[order], score[order]
        taken.append((option[order], before[order]))
    choice, at = [], len(cost) - 1  # the dearest of those left has the smallest score
    for option, before in reversed(taken):
        choice.append(int(option[at]))
        at = int(before[at])
    return choice[::-1]
