"""The experts block against a naive loop, and what the router promises: choice, weights, loads, balance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.kernels.experts import weighted_sum
from nemotron.stack.models.moe import MoE, Router, load_balancing_loss


def naive_experts(x: Tensor, weights: Tensor, chosen: Tensor, up: Tensor, down: Tensor) -> Tensor:
    out = []
    for t in range(len(x)):
        each = [down[e] @ (up[e] @ x[t]).clamp(min=0).pow(2) for e in chosen[t].tolist()]
        out.append(sum(weights[t, k] * y for k, y in enumerate(each)))
    return torch.stack(out)


def test_bf16_outputs_of_many_experts_are_rounded_once() -> None:
    source = torch.Generator().manual_seed(0)
    y, weights = torch.randn(500, 22, 16, generator=source).bfloat16(), torch.rand(500, 22, generator=source)
    exact = torch.einsum("tkd,tk->td", y.double(), weights.double())
    slots = torch.arange(500 * 22).view(500, 22)
    error = (weighted_sum(y.flatten(0, 1), slots, weights).double() - exact).norm()
    assert error < 1.01 * (exact.bfloat16().double() - exact).norm()


def router(**dimensions: object) -> Router:
    config = NemotronHConfig(hidden_size=8, n_routed_experts=6, num_experts_per_tok=3, **dimensions)
    made = Router(config)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


def test_bias_acts_on_the_choice_and_not_on_the_weights() -> None:
    gate = router(routed_scaling_factor=2.5).eval()
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, 5.0, 0.0, -5.0, 0.0, 0.0]))
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    weights, chosen, scores = (tensor.detach() for tensor in gate(x))
    expected_scores = 1 / (1 + torch.exp(-(x.double() @ gate.weight.detach().double().T)))
    torch.testing.assert_close(scores.double(), expected_scores)
    for t in range(len(x)):
        others = sorted((0, 2, 4, 5), key=lambda e: -float(expected_scores[t, e]))[:2]  # 1 always, 3 never
        assert set(chosen[t].tolist()) == {1, *others}
        taken = expected_scores[t, chosen[t]]
        # In fp32, whose rounding differs between processors: a few units of 6e-8.
        torch.testing.assert_close(weights[t].double(), 2.5 * taken / taken.sum(), rtol=1e-6, atol=0)


def test_loads_count_in_training_only_and_are_forgotten_after_an_update() -> None:
    gate, x = router(), torch.randn(17, 8)
    gate.eval()
    gate(x)
    assert gate.expert_load.sum() == 0
    gate.train()
    counts = torch.zeros(6, dtype=torch.int64)
    for part in (x[:5], x[5:]):
        chosen = gate(part)[1]
        for expert in chosen.flatten().tolist():
            counts[expert] += 1
    assert gate.expert_load.tolist() == counts.tolist()
    gate.update_bias(1e-3)
    assert gate.expert_load.sum() == 0
    assert "expert_load" not in gate.state_dict() and "e_score_correction_bias" in gate.state_dict()


def test_bias_moves_by_the_sign_of_the_missing_load() -> None:
    gate = router()
    gate.expert_load.copy_(torch.tensor([0, 4, 8, 4, 7, 1]))  # the mean is 4
    gate.e_score_correction_bias.fill_(0.5)
    gate.update_bias(0.01)
    torch.testing.assert_close(gate.e_score_correction_bias, 0.5 + 0.01 * torch.tensor([1.0, 0, -1, 0, -1, 1]))
    gate.update_bias(0.01)  # no load since: nothing to correct
    torch.testing.assert_close(gate.e_score_correction_bias, 0.5 + 0.01 * torch.tensor([1.0, 0, -1, 0, -1, 1]))


def test_an_unbalanced_router_is_balanced_in_300_steps() -> None:
    """Expert 0 starts at a score of 0.95 against 0.5: chosen by every token. Each step moves the bias by 2e-3."""
    gate = router().train()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.mul_(0.2)
        gate.weight[0, 0] = 3.0
    share = []
    for _ in range(300):
        x = torch.randn(256, 8, generator=source)
        x[:, 0] = 1.0  # a constant feature, so that expert 0's score is always high
        gate(x)
        share.append(gate.expert_load / gate.expert_load.sum())
        gate.update_bias(2e-3)
    assert share[0][0] == pytest.approx(1 / 3)  # in the top three of every token
    settled = torch.stack(share[-20:]).mean(0)
    assert (settled - 1 / 6).abs().max() < 0.02
    assert gate.e_score_correction_bias[0] < gate.e_score_correction_bias[1:].min() - 0.2


@pytest.mark.parametrize(("experts", "top_k", "sequences"), [(8, 2, 1), (6, 3, 4)])
def test_load_balancing_loss_is_one_when_uniform_and_experts_over_k_when_collapsed(
    experts: int, top_k: int, sequences: int
) -> None:
    nearly_uniform = 0.5 + 1e-6 * torch.rand(sequences, 5, experts, generator=torch.Generator().manual_seed(0))
    assert load_balancing_loss(nearly_uniform, top_k).item() == pytest.approx(1.0, abs=1e-4)
    certain = torch.zeros(sequences, 5, experts)
    certain[..., :top_k] = 0.9
    assert load_balancing_loss(certain, top_k).item() == pytest.approx(experts / top_k)


def test_load_balancing_loss_is_taken_per_sequence() -> None:
    """Two sequences, each collapsed on another half of the experts: balanced as a batch, 2 as sequences."""
    scores = torch.zeros(2, 4, 4)
    scores[0, :, :2] = scores[1, :, 2:] = 0.7
    assert load_balancing_loss(scores, 2).item() == pytest.approx(2.0)
    assert load_balancing_loss(scores.view(1, 8, 4), 2).item() == pytest.approx(1.0)


def test_load_balancing_gradient_lowers_the_scores_of_crowded_experts() -> None:
    scores = torch.full((1, 6, 4), 0.5)
    for token, chosen in enumerate([[0, 1]] * 5 + [[0, 2]]):
        scores[0, token, chosen] += 1e-4
    (grad,) = torch.autograd.grad(load_balancing_loss(scores.requires_grad_(), 2), scores)
    # d/d s_te of sum_e f_e mean_t(s_te / sum s) at equal scores: (f_e - mean f) / (T sum s), with f = E counts / (T K)
    fraction = 4 * torch.tensor([6.0, 5, 1, 0]) / 12
    torch.testing.assert_close(grad[0], ((fraction - 1) / (6 * 2.0)).expand(6, -1), rtol=1e-3, atol=1e-4)


@pytest.mark.slow  # to import Megatron-Core
@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
def test_load_balancing_loss_and_its_gradient_are_megatron_core_s() -> None:
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.zeros(())
    for of_sequence in logits:
        chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(of_sequence, 3, "sigmoid")
        counts = chosen.sum(0)
        expected = expected + moe_utils.switch_load_balancing_loss_func(scores, counts, 7, 3, 6, 1.0) / 2
    loss = load_balancing_loss(logits.sigmoid(), 3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_padding_counts_neither_in_the_balance_nor_in_the_load(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("E", dtype=torch.float64).train()
    ids, padded = torch.arange(12).view(2, 6), torch.full((2, 4), 3)
    expected = model(ids, torch.zeros(2, 6, dtype=torch.int64)).load_balancing_loss
    load = model.moe_blocks()[0].gate.expert_load.clone()
    documents = torch.tensor([[0] * 6 + [-1] * 4] * 2)
    torch.testing.assert_close(model(torch.cat([ids, padded], dim=1), documents).load_balancing_loss, expected)
    assert torch.equal(model.moe_blocks()[0].gate.expert_load, 2 * load)


def test_an_even_bias_does_not_hide_uneven_scores_from_the_loss(make_model: Callable[..., NemotronH]) -> None:
    moe: MoE = make_model("E").moe_blocks()[0].train()
    x = torch.randn(2, 9, moe.gate.weight.shape[1], generator=torch.Generator().manual_seed(0))
    before = moe(x)[1]
    moe.gate.e_score_correction_bias[0] = -10.0
    assert torch.equal(moe(x)[1], before)


def test_block_is_routed_plus_shared(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("E", dtype=torch.float64)
    moe: MoE = model.moe_blocks()[0]
    x = torch.randn(2, 7, model.config.hidden_size, dtype=torch.float64)
    out, balance = moe(x)
    assert balance.item() == 0  # outside training
    weights, chosen, scores = moe.gate(x.flatten(0, 1))
    routed = naive_experts(x.flatten(0, 1), weights, chosen, moe.experts.up_proj, moe.experts.down_proj)
    shared = (x @ moe.shared_experts.up_proj.weight.T).clamp(min=0).pow(2) @ moe.shared_experts.down_proj.weight.T
    torch.testing.assert_close(out, routed.view_as(x) + shared)
    moe.train()
    torch.testing.assert_close(moe(x)[1], load_balancing_loss(scores.view(2, 7, -1), moe.gate.top_k))


def test_model_adds_up_the_loss_of_its_expert_blocks(make_model: Callable[..., NemotronH]) -> None:
    ids = torch.arange(12).view(2, 6)
    model = make_model("EE").train()
    seen: list[Tensor] = []
    for moe in model.moe_blocks():
        moe.register_forward_hook(lambda module, args, out: seen.append(out[1]))
    torch.testing.assert_close(model(ids).load_balancing_loss, torch.stack(seen).sum())
    assert seen[0] != seen[1]
    model.update_expert_bias(1e-3)
    assert all(moe.gate.expert_load.sum() == 0 for moe in model.moe_blocks())
    assert make_model("M").train()(ids).load_balancing_loss == 0


def test_the_bias_stays_fp32_in_a_bf16_model(make_model: Callable[..., NemotronH]) -> None:
    """In bf16 0.5 + 0.001 is 0.5: balancing would come to a halt."""
    model = make_model("E").bfloat16().train()
    gate = model.moe_blocks()[0].gate
    assert gate.weight.dtype == torch.bfloat16 and gate.e_score_correction_bias.dtype == torch.float32
    gate.e_score_correction_bias.fill_(0.5)
    gate.expert_load.copy_(torch.tensor([9, 0, 0, 0, 0]))
    gate.update_bias(1e-3)
    torch.testing.assert_close(gate.e_score_correction_bias, torch.tensor([0.499, 0.501, 0.501, 0.501, 0.501]))
    assert model.double().moe_blocks()[0].gate.e_score_correction_bias.dtype == torch.float64
    assert "backbone.layers.0.mixer.gate.e_score_correction_bias" in model.state_dict()


def test_frozen_experts_get_no_gradient(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("E").train()
    experts = model.moe_blocks()[0].experts.requires_grad_(False)
    model(torch.arange(20).view(2, 10)).logits.sum().backward()
    assert experts.up_proj.grad is None and experts.down_proj.grad is None
    router = model.moe_blocks()[0].gate.weight
    assert router.grad is not None and router.grad.abs().sum() > 0
