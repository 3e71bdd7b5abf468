"""The search of Nemotron Nano 2, and bytes in closed form against tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_runspec.errors import UserError
from nemotron.stack.compression.pruning import Target
from nemotron.stack.compression.search import (
    Budget,
    Choices,
    find_candidates,
    inference_bytes,
    rank_candidates,
    sixteenths,
    within_limits,
)
from nemotron.stack.models import NemotronH
from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.models.published.presets import PRESETS

FULL, PUBLISHED = PRESETS["nano2-12b"], PRESETS["nano2-9b"]
GIB = 2**30


def blocks_of(pattern: str) -> tuple[int, ...]:
    """Indices of the 12B's blocks that spell a pattern: the first ones that do."""
    found = list[int]()
    for symbol in pattern:
        found.append(FULL.hybrid_override_pattern.index(symbol, found[-1] + 1 if found else 0))
    return tuple(found)


def choices() -> Choices:
    """Embedding 4480-5120, FFN 13440-20480, Mamba heads 112-128, at the published 56 blocks."""
    return Choices(
        blocks=(blocks_of(PUBLISHED.hybrid_override_pattern),),
        hidden_size=(4480, 4800, 5120),
        intermediate_size=tuple(range(13440, 20481, 1120)),
        mamba_num_heads=(112, 120, 128),
        mamba_head_dim=(80,),
        num_attention_heads=(40,),
    )


def test_the_published_9b_is_found_in_its_budget() -> None:
    """19.66 GiB at 131,072 tokens, one row; 8.89 B parameters."""
    budget = Budget(int(19.66 * GIB), seq_len=131072)
    found = find_candidates(FULL, choices(), budget, target_parameters=8_888_000_000)
    assert len(found) == 10
    assert found[0].config == PUBLISHED
    assert inference_bytes(FULL, 131072) > budget.num_bytes > max(candidate.num_bytes for candidate in found)
    distances = [abs(candidate.num_parameters - 8_888_000_000) for candidate in found]
    assert distances == sorted(distances)


def test_sixteenths_come_near_to_the_published_size() -> None:
    removed = tuple(set(range(62)) - set(blocks_of(PUBLISHED.hybrid_override_pattern)))
    shapes = sixteenths(FULL, removed)
    assert [len(blocks) for blocks in shapes.blocks] == [*range(62, 55, -1)] and len(sixteenths(FULL).blocks) == 1
    assert set(range(62)) - set(shapes.blocks[2]) == set(removed[:2])
    assert shapes.hidden_size == (3840, 4160, 4480, 4800, 5120) and shapes.mamba_num_heads == (120, 128)
    found = find_candidates(FULL, shapes, Budget(int(19.66 * GIB), seq_len=131072), 8_888_000_000)
    assert found[0].num_parameters == pytest.approx(8_888_000_000, rel=0.01)


@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_are_those_of_tensors(model: NemotronH, rows: int) -> None:
    cache = Cache.allocate(model.config, rows, 50, torch.bfloat16, torch.device("meta"))  # a GPU's: bf16 keys
    weights = sum(parameter.nbytes for parameter in model.bfloat16().parameters())
    states = 0
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            states += layer.k.nbytes + layer.v.nbytes
        elif isinstance(layer, MambaCache):
            states += layer.ssm.nbytes + sum(conv.nbytes for conv in layer.conv)
    assert inference_bytes(model.config, 50, rows) == weights + states


def test_limits_are_40_percent_of_a_width_and_20_percent_of_the_blocks(model: NemotronH) -> None:
    whole, config = Target.whole(model.config), model.config  # 20 neurons, 5 blocks
    assert within_limits(config, replace(whole, intermediate_size=12, blocks=(0, 1, 2, 3)))
    assert not within_limits(config, replace(whole, intermediate_size=11))
    assert not within_limits(config, replace(whole, blocks=(0, 1, 2)))


def test_what_cannot_be_found_is_said() -> None:
    with pytest.raises(UserError, match="no choice fits 1,073,741,824 bytes"):
        find_candidates(FULL, choices(), Budget(GIB, 131072), 8_888_000_000)
    with pytest.raises(UserError, match="near enough"):
        find_candidates(FULL, replace(choices(), hidden_size=(1024,)), Budget(20 * GIB, 8192), 8_888_000_000)
    with pytest.raises(UserError, match="multiple of n_groups"):
        find_candidates(FULL, replace(choices(), mamba_num_heads=(123,)), Budget(20 * GIB, 8192), 8_888_000_000)


def test_the_callers_score_decides() -> None:
    found = find_candidates(FULL, choices(), Budget(20 * GIB, 131072), 8_888_000_000, count=3)
    ranked = rank_candidates(found, lambda candidate: -candidate.target.intermediate_size)
    widths = [candidate.target.intermediate_size for candidate, _ in ranked]
    assert widths == sorted(widths) and {score for _, score in ranked} == {-float(width) for width in widths}
