"""The search of AutoQuantize against exhaustive search, its scores against gradients worked out one layer at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.quantization.autoquantize import (
    BITS,
    Group,
    allocate,
    candidates,
    fisher_scores,
    group_matrices,
    make_monotone,
    search,
)
from nemotron.stack.quantization.fp8_ptq import fake_fp8
from nemotron.stack.quantization.layers import Amax, layer_kinds, matrix
from nemotron.stack.quantization.nvfp4 import fake_nvfp4, global_scale_of
from nemotron.stack.training.losses import next_token_loss

DIMENSIONS = {
    "hidden_size": 32, "head_dim": 16, "mamba_head_dim": 16, "moe_intermediate_size": 48, "intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16,
}  # fmt: skip
AMAX = torch.tensor(3.0)  # of all activations: what is beyond saturates


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("M*E-", **DIMENSIONS).eval()


def names_of(model: NemotronH) -> list[str]:
    return [name for name in layer_kinds(model.config) if name != "lm_head"]


def scores_of(model: NemotronH, groups: list[Group]) -> dict[str, dict[str, float]]:
    kept = {name: AMAX.item() for name in names_of(model) if name.endswith(("k_proj", "v_proj"))}
    amax = Amax({name: AMAX.item() for name in names_of(model)}, kv=kept)
    ids = torch.randint(61, (3, 2, 20), generator=torch.Generator().manual_seed(0))
    return fisher_scores(model, groups, candidates(model, groups, ["NVFP4", "FP8"], amax, "max"), ids, loss_of(model))


def loss_of(model: NemotronH) -> Callable[[Tensor], Tensor]:
    return lambda ids: next_token_loss(model(ids[:, :-1]).logits, ids[:, 1:])


def exhaustive(costs: list[list[int]], scores: list[list[float]], budget: int) -> tuple[float, int] | None:
    """Smallest score and, with it, the smallest cost, by trying every combination."""
    best = None
    for choice in itertools.product(*(range(len(row)) for row in costs)):
        cost = sum(row[i] for row, i in zip(costs, choice, strict=True))
        total = sum(row[i] for row, i in zip(scores, choice, strict=True))
        if cost <= budget and (best is None or (total, cost) < best):
            best = (total, cost)
    return best


@given(st.data())
def test_allocation_equals_exhaustive_search(data: st.DataObject) -> None:
    """Scores are small integers, so that sums are exact and ties abound."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    costs = [data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)) for n in shape]
    scores = [[float(s) for s in data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))] for n in shape]
    budget = data.draw(st.integers(0, 90))
    expected = exhaustive(costs, scores, budget)
    if expected is None:
        with pytest.raises(ValueError, match="cheapest"):
            allocate(costs, scores, budget)
    else:
        choice = allocate(costs, scores, budget)
        total = sum(row[i] for row, i in zip(scores, choice, strict=True))
        assert (total, sum(row[i] for row, i in zip(costs, choice, strict=True))) == expected


def test_allocation_for_as_many_layers_as_super_has() -> None:
    """88 blocks in groups of a few sizes, against the integer programming solver HiGHS."""
    source = np.random.default_rng(0)
    sizes = np.repeat([76_021_760, 33_554_432, 2_818_572_288, 22_020_096, 22_020_096, 18_874_368, 16_777_216],
                      [40, 40, 40, 40, 40, 8, 8])  # fmt: skip
    bits = np.array([float(BITS[name]) for name in ("NVFP4", "FP8", "BF16")])
    costs = (sizes[:, None] * bits).astype(np.int64)
    scores = np.sort(source.exponential(sizes[:, None] ** 0.5, (len(sizes), 3)))[:, ::-1].copy()
    scores[:, 2] = 0
    budget = int(sizes.sum() * 4.75)
    choice = allocate(costs.tolist(), scores.tolist(), budget)
    rows = np.arange(len(sizes))
    assert costs[rows, choice].sum() <= budget
    one_each = np.kron(np.eye(len(sizes)), np.ones(3))
    solved = optimize.milp(
        scores.flatten(),
        integrality=np.ones(scores.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(costs.flatten() / budget, -np.inf, 1),
        ],
        options={"mip_rel_gap": 0},
    )
    assert solved.success and scores[rows, choice].sum() == pytest.approx(solved.fun, rel=1e-9)


def test_formats_with_more_bits_never_score_worse() -> None:
    assert make_monotone([3.0, 5.0, 0.0]) == [3.0, 3.0, 0.0]
    assert make_monotone([3.0, 2.0, 2.5, 0.0]) == [3.0, 2.0, 2.0, 0.0]


def test_kernels_decide_what_shares_a_format(model: NemotronH) -> None:
    groups = {group.name: group for group in group_matrices(names_of(model))}
    attention, experts = "backbone.layers.1.mixer", "backbone.layers.2.mixer"
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    assert groups[f"{attention}.qkv_proj"] == Group(f"{attention}.qkv_proj", qkv, qkv)
    assert groups[f"{experts}.experts"] == Group(
        f"{experts}.experts", (f"{experts}.experts.up_proj", f"{experts}.experts.down_proj"), (experts,)
    )
    alone = {"0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.o_proj", "2.mixer.shared_experts.up_proj",
             "2.mixer.shared_experts.down_proj", "2.mixer.fc1_latent_proj", "2.mixer.fc2_latent_proj",
             "3.mixer.up_proj", "3.mixer.down_proj"}  # fmt: skip
    assert set(groups) == {f"backbone.layers.{name}" for name in alone} | {
        f"{attention}.qkv_proj",
        f"{experts}.experts",
    }


def rounding(
    algorithm: str, amax: Tensor | None = None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What a format does to a matrix, of which `amax` is the largest value, and to what it is multiplied with."""
    if algorithm == "FP8":
        scale = None if amax is None else amax / 448
        return lambda w: fake_fp8(w, scale=scale), lambda x: fake_fp8(x, scale=AMAX / 448)
    scale = None if amax is None else global_scale_of(amax)
    return lambda w: fake_nvfp4(w, global_scale=scale), lambda x: fake_nvfp4(x, global_scale=global_scale_of(AMAX))


def test_scores_are_squared_gradients_times_differences(model: NemotronH) -> None:
    groups = group_matrices(names_of(model))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    scores = scores_of(model, groups)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    for name, module in model.named_modules():
        assert {k: v for k, v in vars(module).items() if v is not None} == {
            k: v for k, v in attributes[name].items() if v is not None
        }
    assert set(scores) == {group.name for group in groups}

    # Again, one module at a time, from its input, its gradient and its weights.
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, ...]], None]:
        def hook(_: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            out = output[0] if isinstance(output, tuple) else output
            out.retain_grad()
            seen[name] = (args[0].detach(), out)

        return hook

    mixer = model.blocks()[2].mixer
    experts = [
        (up.detach(), down.detach()) for up, down in zip(mixer.experts.up_proj, mixer.experts.down_proj, strict=True)
    ]

    def routed(x_TD: Tensor, fake: Callable[[Tensor], Tensor], fake_input: Callable[[Tensor], Tensor]) -> Tensor:
        """Token by token, expert by expert."""
        weights_TK, chosen_TK, _ = mixer.gate(x_TD)
        latent_TD = x_TD @ mixer.fc1_latent_proj.weight.T
        out = torch.zeros_like(latent_TD)
        for token, (weights, chosen) in enumerate(zip(weights_TK, chosen_TK, strict=True)):
            for weight, expert in zip(weights, chosen.tolist(), strict=True):
                up, down = experts[expert]
                active = (fake_input(latent_TD[token]) @ fake(up).T).relu().square()
                out[token] += weight * (fake_input(active) @ fake(down).T)
        return out @ mixer.fc2_latent_proj.weight.T

    names = {name for group in groups for name in group.scored_at}
    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    expected = {group.name: {"NVFP4": 0.0, "FP8": 0.0} for group in groups}
    for batch in torch.randint(61, (3, 2, 20), generator=torch.Generator().manual_seed(0)):
        loss_of(model)(batch).backward()
        for group, (algorithm, name) in itertools.product(groups, itertools.product(("NVFP4", "FP8"), names)):
            if name in group.scored_at:
                amax = None  # experts have a scale each; q, k and v one for all three
                if not name.endswith("mixer"):
                    amax = torch.stack([matrix(model, each).detach().abs().amax() for each in group.matrices]).amax()
                (x, out), (fake, fake_input) = seen[name], rounding(algorithm, amax)
                with torch.no_grad():
                    if amax is None:
                        x_TD = x.flatten(0, 1)
                        same = routed(x_TD, lambda w: w, lambda x: x)
                        difference = (routed(x_TD, fake, fake_input) - same).view_as(out)
                    else:
                        weight = matrix(model, name)
                        difference = fake_input(x) @ fake(weight).T - x @ weight.T
                    assert out.grad is not None
                    expected[group.name][algorithm] += (out.grad * difference).square().sum().item()
    for handle in handles:
        handle.remove()
    for name, by_format in scores.items():
        assert by_format == pytest.approx(expected[name], rel=1e-3)
        assert by_format["NVFP4"] > by_format["FP8"] > 0


def test_the_search_on_a_model_equals_trying_all_combinations(model: NemotronH) -> None:
    groups = group_matrices(names_of(model))
    scores = scores_of(model, groups)
    sizes = [sum(matrix(model, name).numel() for name in group.matrices) for group in groups]
    names = ["NVFP4", "FP8", "BF16"]
    # All 3^11 combinations, exactly: sums in float64, costs in half bits.
    options = np.array(list(itertools.product(range(3), repeat=len(groups))))
    costs = np.array([[size * int(2 * BITS[name]) for name in names] for size in sizes])
    monotone = np.array(
        [make_monotone([scores[group.name]["NVFP4"], scores[group.name]["FP8"], 0.0]) for group in groups]
    )
    columns = np.arange(len(groups))
    all_costs, all_scores = costs[columns, options].sum(1), monotone[columns, options].sum(1)
    plans = []
    for effective_bits in (4.5, 4.75, 5.4, 6.0, 9.0, 16.0):
        plan = search(model, groups, scores, effective_bits)
        index = []
        for group in groups:
            (chosen,) = {plan.get(name, "BF16") for name in group.matrices}
            index.append(names.index(chosen))
        fits = all_costs <= 2 * effective_bits * sum(sizes)
        assert costs[columns, index].sum() <= 2 * effective_bits * sum(sizes)
        assert monotone[columns, index].sum() == pytest.approx(all_scores[fits].min(), rel=1e-12)
        plans.append(plan)
    assert all(one != other for one, other in itertools.pairwise(plans))
    assert plans[0] == dict.fromkeys(names_of(model), "NVFP4") and plans[-1] == {}
    with pytest.raises(ValueError, match=r"4\.50 bits"):
        search(model, groups, scores, 4.4)


def test_what_blocks_do_not_divide_is_no_candidate_of_theirs(small_model: Callable[..., NemotronH]) -> None:
    model = small_model("E*", **(DIMENSIONS | {"moe_intermediate_size": 24})).eval()
    groups = group_matrices(names_of(model))
    scores = scores_of(model, groups)
    formats = {name: list(of_group) for name, of_group in scores.items()}
    assert formats.pop("backbone.layers.0.mixer.experts") == ["FP8"]  # 24 values of an expert go into down_proj
    assert formats and all(algorithms == ["NVFP4", "FP8"] for algorithms in formats.values())
    plan = search(model, groups, scores, 8.0)
    assert plan.get("backbone.layers.0.mixer.experts.up_proj") in ("FP8", None)


def test_a_group_may_have_fewer_candidates(model: NemotronH) -> None:
    """q, k and v in FP8 or BF16, o_proj as it is: nothing else is chosen, and their bits count all the same."""
    groups = group_matrices(names_of(model))
    scores = scores_of(model, groups)
    scores["backbone.layers.1.mixer.qkv_proj"].pop("NVFP4")
    scores["backbone.layers.1.mixer.o_proj"] = {}
    plan = search(model, groups, scores, 7.0)
    assert {plan.get(f"backbone.layers.1.mixer.{name}_proj") for name in "qkv"} <= {"FP8", None}
    assert "backbone.layers.1.mixer.o_proj" not in plan
    sizes = {name: matrix(model, name).numel() for name in names_of(model)}
    assert sum(size * BITS[plan.get(name, "BF16")] for name, size in sizes.items()) <= 7 * sum(sizes.values())
