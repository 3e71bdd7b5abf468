"""Which shapes to try: all that fit the memory and stay near enough to the full model. Next: `pruning.py`.

Nemotron Nano 2 (arXiv 2508.14444, section on pruning) looked for what fits 19.66 GiB with 131,072 tokens of context in
one row, distilled the best candidates for a while, and went on with the best of those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nemo_runspec.errors import UserError
from nemotron.stack.compression.pruning import WIDTHS, Target
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.published.memory import (
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
    weight_bytes,
)
from nemotron.stack.models.published.parameters import count_parameters

# How much of a width and of the number of blocks may go at most (ModelOpt's search for Nemotron-H).
MAX_WIDTH_CUT, MAX_DEPTH_CUT = 0.4, 0.2


@dataclass(frozen=True)
class Choices:
    """The values of each dimension that candidates combine; `blocks` has the kept indices of each depth."""

    blocks: tuple[tuple[int, ...], ...]
    hidden_size: tuple[int, ...]
    intermediate_size: tuple[int, ...]
    mamba_num_heads: tuple[int, ...]
    mamba_head_dim: tuple[int, ...]
    num_attention_heads: tuple[int, ...]


def sixteenths(full: NemotronHConfig, removed: Sequence[int] = ()) -> Choices:
    """Narrower shapes in steps of a sixteenth: hidden size from 12/16, the MLP from 10/16; all query heads stay.

    Nano 2 looked at 14/16 to 16/16 and 10.5/16 to 16/16. Mamba loses a head of each group, or none, and no channel. Of
    `removed` as many blocks go as one likes, the first of them first.
    """
    blocks = tuple(range(len(full.hybrid_override_pattern)))
    return Choices(
        blocks=tuple(tuple(i for i in blocks if i not in removed[:n]) for n in range(len(removed) + 1)),
        hidden_size=tuple(full.hidden_size * n // 16 for n in range(12, 17)),
        intermediate_size=tuple(full.intermediate_size * n // 16 for n in range(10, 17)),
        mamba_num_heads=(full.mamba_num_heads - full.n_groups, full.mamba_num_heads),
        mamba_head_dim=(full.mamba_head_dim,),
        num_attention_heads=(full.num_attention_heads,),
    )


@dataclass(frozen=True)
class Budget:
    """Bytes that a candidate may take with `batch_size` rows of `seq_len` tokens in its caches."""

    num_bytes: int
    seq_len: int
    batch_size: int = 1


@dataclass(frozen=True)
class Candidate:
    """A shape that fits, its config, number of parameters, and bytes at the budget's rows and tokens."""

    target: Target
    config: NemotronHConfig
    num_parameters: int
    num_bytes: int


def inference_bytes(config: NemotronHConfig, seq_len: int, batch_size: int = 1) -> int:
    """Bytes of weights (bf16), keys and values (bf16), convolution states (bf16) and SSM states (fp32).

    With P parameters, L tokens, B rows; a attention blocks of J key/value heads of X channels; m Mamba blocks of inner
    width I, state size N, G groups and convolution width K:

        2 P + B (4 a J X L  +  4 m I N  +  2 m (K - 1) (I + 2 G N))

    Activations and what the program itself takes come on top.
    """
    states = kv_cache_bytes_per_token(config) * seq_len + ssm_state_bytes(config) + conv_state_bytes(config)
    return weight_bytes(count_parameters(config).total, "bf16") + batch_size * states


def find_candidates(
    full: NemotronHConfig, choices: Choices, budget: Budget, target_parameters: int, count: int = 10
) -> list[Candidate]:
    """The `count` shapes within the budget and the limits whose number of parameters is nearest to the target.

    The limits: no width below 60 % of the full model's, no fewer than 80 % of its blocks. Of two that are equally near,
    the larger comes first.

    Raises:
        UserError: a choice that does not fit the model, or nothing fits the budget and the limits.
    """
    within, fitting = list[Candidate](), list[Candidate]()
    for target in _combinations(choices):
        config = target.config(full)
        if not within_limits(full, target):
            continue
        num_bytes = inference_bytes(config, budget.seq_len, budget.batch_size)
        candidate = Candidate(target, config, count_parameters(config).total, num_bytes)
        within.append(candidate)
        if num_bytes <= budget.num_bytes:
            fitting.append(candidate)
    if not within:
        raise UserError(
            "no choice is near enough to the full model",
            f"widths of {1 - MAX_WIDTH_CUT:.0%} and depths of {1 - MAX_DEPTH_CUT:.0%} of its own at least",
        )
    if not fitting:
        smallest = min(candidate.num_bytes for candidate in within)
        raise UserError(
            f"no choice fits {budget.num_bytes:,} bytes at {budget.batch_size} x {budget.seq_len} tokens",
            f"the smallest takes {smallest:,}",
        )
    fitting.sort(key=lambda c: (abs(c.num_parameters - target_parameters), -c.num_parameters))
    return fitting[:count]


def within_limits(full: NemotronHConfig, target: Target) -> bool:
    """Whether at most 40 % of each width and 20 % of the blocks go."""
    widths = all(getattr(target, name) >= (1 - MAX_WIDTH_CUT) * getattr(full, name) for name in WIDTHS)
    return widths and len(target.blocks) >= (1 - MAX_DEPTH_CUT) * len(full.hybrid_override_pattern)


def _combinations(choices: Choices) -> Iterator[Target]:
    widths = (getattr(choices, name) for name in WIDTHS)
    for blocks, *sizes in itertools.product(choices.blocks, *widths):
        yield Target(blocks, **dict(zip(WIDTHS, sizes, strict=True)))


def rank_candidates(
    candidates: Sequence[Candidate], score: Callable[[Candidate], float]
) -> list[tuple[Candidate, float]]:
    """Candidates with their scores, highest first. `score` prunes one, and trains it for a while if it likes."""
    scored = [(candidate, score(candidate)) for candidate in candidates]
    return sorted(scored, key=lambda pair: pair[1], reverse=True)
