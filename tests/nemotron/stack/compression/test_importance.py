"""Scores against the same sums over activations that a second forward pass writes out, and closed forms."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor

from nemo_runspec.errors import UserError
from nemotron.stack.compression.importance import (
    cosine_distances,
    measure_importance,
    removal_errors,
    remove_iteratively,
    spearman,
)
from nemotron.stack.models import NemotronH, NemotronHConfig


def score(x_BLN: Tensor) -> Tensor:
    return x_BLN.abs().mean(1).norm(dim=0)


@torch.no_grad()
def test_widths(model: NemotronH, rows: list[Tensor]) -> None:
    importance = measure_importance(model, rows)
    x, hidden = model.backbone.embeddings(torch.cat(rows)), torch.zeros(24, dtype=torch.float64)
    for index, (symbol, block) in enumerate(zip("M-*M-", model.blocks(), strict=True)):
        normed, mixer = block.norm(x), block.mixer
        hidden += score(normed)
        if symbol == "M":
            expected = score(normed @ mixer.in_proj.weight[48:96].T).view(8, 6)  # rows 0-47 are z, 96 on B
            actual = importance.mamba_HP[index]
        elif symbol == "-":
            expected = score((normed @ mixer.up_proj.weight.T).relu() ** 2)
            actual = importance.ffn_F[index]
        else:
            q, k, v = (
                (normed @ proj.weight.T).view(5, 11, -1, 5).transpose(1, 2)
                for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
            )
            k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
            past = torch.ones(11, 11).tril().log().double()
            heads = ((q @ k.mT / 5**0.5 + past).softmax(-1) @ v).transpose(1, 2).flatten(2)
            expected = score(heads).view(6, 5).square().sum(1).sqrt()
            actual = importance.attention_A[index]
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        x = block(x)[0]
    torch.testing.assert_close(importance.hidden_D, hidden, rtol=1e-12, atol=1e-12)
    assert set(importance.ffn_F) == {1, 4} and set(importance.attention_A) == {2} and set(importance.mamba_HP) == {0, 3}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_error_of_a_removal_is_that_of_a_model_whose_block_adds_nothing(model: NemotronH, rows: list[Tensor]) -> None:
    ids = torch.cat(rows)
    whole = model(ids).logits
    errors = removal_errors(model, rows, removed=[1])
    assert set(errors) == {0, 2, 3, 4}
    output = ["mixer.out_proj", "mixer.down_proj", "mixer.o_proj", "mixer.out_proj", "mixer.down_proj"]
    model.get_submodule(f"backbone.layers.1.{output[1]}").weight.zero_()
    for index, error in errors.items():
        weight = model.get_submodule(f"backbone.layers.{index}.{output[index]}").weight
        kept = weight.clone()
        weight.zero_()
        assert error == pytest.approx((model(ids).logits - whole).square().mean().item(), rel=1e-10)
        weight.copy_(kept)


@torch.no_grad()
def test_a_block_that_adds_nothing_goes_first_and_one_that_has_to_stay_stays(
    model: NemotronH, rows: list[Tensor]
) -> None:
    model.get_submodule("backbone.layers.3.mixer.out_proj").weight.zero_()
    first, second = remove_iteratively(model, rows, 2)
    assert (first.block, first.error) == (3, 0.0)
    measured = removal_errors(model, rows)
    assert remove_iteratively(model, rows, 2, errors=measured) == [first, second]
    assert remove_iteratively(model, rows, 1, errors=measured | {4: -1.0})[0].block == 4  # not measured once more
    left = removal_errors(model, rows, [3])
    assert (second.block, second.error) == (min(left, key=left.__getitem__), min(left.values()))
    assert cosine_distances(model, rows)[3] == pytest.approx(0, abs=1e-12)
    kept = remove_iteratively(model, rows, 2, {"M": 2, "*": 1})
    assert {removal.block for removal in kept} == {1, 4}
    with pytest.raises(UserError, match="only 2 may go"):
        remove_iteratively(model, rows, 3, {"M": 2, "*": 1})


@torch.no_grad()
def test_cosine_distance_of_a_block_that_turns_every_token_around(model: NemotronH, rows: list[Tensor]) -> None:
    """Block 0 adds -2 x: the input of its norm is a unit vector of constant rms, and a linear mixer gives -2 of it."""
    block = model.blocks()[1]
    model.backbone.layers = torch.nn.ModuleList([block])
    object.__setattr__(model.config, "hybrid_override_pattern", "-")
    model.backbone.embeddings.weight.copy_(torch.eye(24).repeat(3, 1)[:61])  # one channel a token
    block.norm.weight.fill_(1)
    block.norm.eps = 0.0
    block.mixer.up_proj.weight.copy_(torch.eye(24)[:20])
    block.mixer.down_proj.weight.copy_(-2 / 24 * torch.eye(24)[:, :20])  # relu(sqrt(24))^2 = 24
    ids = torch.cat(rows)
    turned = (ids % 24 < 20).sum().item()
    assert cosine_distances(model, rows)[0] == pytest.approx(2 * turned, rel=1e-12)


@pytest.mark.parametrize(
    "values", [([3.0, 1.0, 2.0, 9.0], [1.0, 2.0, 0.5, 4.0]), ([1.0, 1.0, 2.0, 3.0, 3.0], [5.0, 4.0, 4.0, 1.0, 0.0])]
)
def test_rank_correlation(values: tuple[list[float], list[float]]) -> None:
    assert spearman(*values) == pytest.approx(spearmanr(*values).statistic, abs=1e-12)


def test_what_is_not_pruned_is_refused(
    small_config: type[NemotronHConfig], rows: list[Tensor], model: NemotronH
) -> None:
    with pytest.raises(UserError, match="experts"):
        measure_importance(NemotronH(small_config("ME")), rows)
    with pytest.raises(UserError, match="no calibration rows"):
        measure_importance(model, [])
