"""The pruned model against the full one, permuted or masked, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemo_runspec.errors import UserError
from nemotron.stack.compression.importance import Importance, measure_importance
from nemotron.stack.compression.pruning import Target, choose_units, prune
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.parameters import count_parameters


def assert_equal_logits(pruned: NemotronH, other: NemotronH, rows: list[Tensor]) -> None:
    ids = torch.cat(rows)
    with torch.no_grad():
        torch.testing.assert_close(pruned(ids).logits, other(ids).logits, rtol=1e-12, atol=1e-12)


def test_order_of_units_changes_nothing(model: NemotronH, rows: list[Tensor]) -> None:
    importance, whole = measure_importance(model, rows), Target.whole(model.config)
    units = choose_units(importance, whole, model.config)
    for order in (units.hidden_D, units.ffn_F[4], units.attention_A[2], units.mamba_H[0], units.mamba_P[3]):
        assert sorted(order.tolist()) == list(range(len(order))) != order.tolist()
    permuted = prune(model, importance, whole)
    assert not torch.equal(permuted.lm_head.weight, model.lm_head.weight)
    assert_equal_logits(permuted, model, rows)


def test_units_are_ranked_within_their_group() -> None:
    """6 query heads of 2 groups, 4 Mamba heads of 2 groups with 3 channels, by hand."""
    config = NemotronHConfig(
        "M*-", hidden_size=3, intermediate_size=3, num_attention_heads=6, num_key_value_heads=2,
        mamba_num_heads=4, mamba_head_dim=3, n_groups=2,
    )  # fmt: skip
    importance = Importance(
        hidden_D=torch.tensor([1.0, 3.0, 2.0]),
        ffn_F={2: torch.tensor([2.0, 1.0, 2.0])},
        attention_A={1: torch.tensor([0.1, 0.3, 0.2, 9.0, 7.0, 8.0])},
        # Norms of the columns 5.1, 5.4 and 6.8. Without the first channel head 1 beats head 0, with it it would not.
        mamba_HP={0: torch.tensor([[5.0, 0.0, 2.0], [0.0, 2.0, 3.0], [1.0, 0.0, 4.0], [0.0, 5.0, 4.0]])},
    )
    target = replace(
        Target.whole(config), hidden_size=2, intermediate_size=2, num_attention_heads=4, mamba_num_heads=2,
        mamba_head_dim=2,
    )  # fmt: skip
    units = choose_units(importance, target, config)
    assert units.hidden_D.tolist() == [1, 2]
    assert units.ffn_F[2].tolist() == [0, 2]  # the first of equals
    assert units.attention_A[1].tolist() == [1, 2, 3, 5]
    assert units.mamba_P[0].tolist() == [2, 1]
    assert units.mamba_H[0].tolist() == [1, 3]


def masked(model: NemotronH, importance: Importance, target: Target) -> NemotronH:
    """The full model in which what is cut adds 0, and each RMS is that over what stays, as `pruning.py` says."""
    config, model = model.config, copy.deepcopy(model)
    units = choose_units(importance, target, config)

    def cut(size: int, kept: Tensor) -> Tensor:
        gone = torch.ones(size, dtype=torch.bool)
        gone[kept] = False
        return gone

    def narrow(norm: torch.nn.Module, share: float) -> None:
        norm.weight.mul_(share**0.5)
        norm.eps *= share

    hidden = cut(config.hidden_size, units.hidden_D)
    share = target.hidden_size / config.hidden_size
    with torch.no_grad():
        model.backbone.embeddings.weight[:, hidden] = 0
        narrow(model.backbone.norm_f, share)
        for index, block in enumerate(model.blocks()):
            mixer, symbol = block.mixer, config.hybrid_override_pattern[index]
            output = {"M": "out_proj", "*": "o_proj", "-": "down_proj"}[symbol]
            weight = getattr(mixer, output).weight
            if symbol == "-":
                weight[:, cut(config.intermediate_size, units.ffn_F[index])] = 0
            elif symbol == "*":
                heads = cut(config.num_attention_heads, units.attention_A[index])
                weight[:, heads.repeat_interleave(config.head_dim)] = 0
            else:  # silu(0) = 0: a closed gate, so that neither norm nor out_proj sees the unit
                heads = cut(config.mamba_num_heads, units.mamba_H[index])
                channels = cut(config.mamba_head_dim, units.mamba_P[index])
                closed = (heads[:, None] | channels).flatten()
                mixer.in_proj.weight[: len(closed)][closed] = 0
                narrow(mixer.norm, target.mamba_num_heads * target.mamba_head_dim / config.mamba_inner_size)
            weight[hidden] = 0
            if index not in target.blocks:
                weight.zero_()
            narrow(block.norm, share)
    return model


CUTS = {
    "neurons": {"intermediate_size": 13},
    "query heads": {"num_attention_heads": 4},
    "mamba heads": {"mamba_num_heads": 6},
    "mamba channels": {"mamba_head_dim": 4},
    "hidden": {"hidden_size": 17},
    "blocks": {"blocks": (0, 2, 4)},
}
CUTS["all"] = {name: value for cut in CUTS.values() for name, value in cut.items()}


@pytest.mark.parametrize("cut", CUTS)
def test_pruned_is_the_full_model_masked(model: NemotronH, rows: list[Tensor], cut: str) -> None:
    importance, target = measure_importance(model, rows), replace(Target.whole(model.config), **CUTS[cut])
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pruned = prune(model, importance, target)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert sum(p.numel() for p in pruned.parameters()) == count_parameters(pruned.config).total
    assert_equal_logits(pruned, masked(model, importance, target), rows)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with torch.no_grad():
        apart = (pruned(rows[0]).logits - model(rows[0]).logits).abs().max()
        assert apart > 1e-3  # what was cut did something
    pruned(rows[0]).logits.sum().backward()
    assert all(p.grad is not None for p in pruned.parameters())


def test_units_that_do_nothing_go_without_a_trace(model: NemotronH, rows: list[Tensor]) -> None:
    """A neuron that never fires, heads that attend to values of 0: importance 0, and the logits stay."""
    with torch.no_grad():
        for index in (1, 4):
            model.blocks()[index].mixer.up_proj.weight[[3, 8, 9]] = 0
        values = model.blocks()[2].mixer.o_proj.weight
        values[:, 5:10] = 0  # head 1 and head 4 are read by nobody
        values[:, 20:25] = 0
    importance = measure_importance(model, rows)
    assert importance.ffn_F[1][[3, 8, 9]].tolist() == [0, 0, 0]
    importance.attention_A[2][[1, 4]] = 0  # o_proj's input does not tell what o_proj does with it
    target = replace(Target.whole(model.config), intermediate_size=17, num_attention_heads=4)
    assert_equal_logits(prune(model, importance, target), model, rows)


def test_a_target_that_does_not_fit_is_refused(model: NemotronH, rows: list[Tensor]) -> None:
    whole = Target.whole(model.config)
    for wrong in (
        {"blocks": (1, 0)}, {"blocks": (0, 5)}, {"blocks": ()}, {"hidden_size": 25}, {"mamba_head_dim": 0},
        {"mamba_num_heads": 5}, {"num_attention_heads": 3},
    ):  # fmt: skip
        with pytest.raises(UserError):
            replace(whole, **wrong).config(model.config)
