"""LatentMoE against the formula written out, token by token: which part sees the latent and which the full width."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.moe import MoE

LATENT = {"moe_latent_size": 9, "n_routed_experts": 7, "num_experts_per_tok": 3, "routed_scaling_factor": 5.0}


def slow_latent_moe(moe: MoE, x_TD: Tensor) -> Tensor:
    """fc2(sum_k w_k down_k relu(up_k fc1 x)^2) + shared(x), scores and shared expert from the full width."""
    assert moe.fc1_latent_proj is not None and moe.fc2_latent_proj is not None
    rows = []
    for x_D in x_TD:
        scores_E = torch.sigmoid(moe.gate.weight @ x_D)
        chosen = (scores_E + moe.gate.e_score_correction_bias).topk(moe.gate.top_k).indices.tolist()
        total = sum(scores_E[e] for e in chosen)
        latent = moe.fc1_latent_proj.weight @ x_D
        mixed = torch.zeros_like(latent)
        for e in chosen:
            hidden = (moe.experts.up_proj[e] @ latent).clamp(min=0).pow(2)
            mixed = mixed + moe.gate.scaling_factor * scores_E[e] / total * (moe.experts.down_proj[e] @ hidden)
        shared = (moe.shared_experts.up_proj.weight @ x_D).clamp(min=0).pow(2)
        rows.append(moe.fc2_latent_proj.weight @ mixed + moe.shared_experts.down_proj.weight @ shared)
    return torch.stack(rows)


def test_output_and_gradients_equal_the_formula(make_model: Callable[..., NemotronH]) -> None:
    moe = make_model("E", dtype=torch.float64, **LATENT).moe_blocks()[0]
    source = torch.Generator().manual_seed(0)
    x = torch.randn(2, 11, 24, generator=source, dtype=torch.float64, requires_grad=True)
    out, expected = moe(x)[0], slow_latent_moe(moe, x.flatten(0, 1)).view(2, 11, 24)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(out.shape, generator=source, dtype=torch.float64)
    inputs = {"x": x, **dict(moe.named_parameters())}
    for name, one, other in zip(
        inputs,
        torch.autograd.grad((out * upstream).sum(), list(inputs.values())),
        torch.autograd.grad((expected * upstream).sum(), list(inputs.values())),
        strict=True,
    ):
        assert other.norm() > 0, name
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_shapes_and_names_are_the_published_ones() -> None:
    with torch.device("meta"):
        model = NemotronH(NemotronHConfig(hybrid_override_pattern="E", hidden_size=40, **LATENT))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "mixer" in name}
    assert shapes == {
        "backbone.layers.0.mixer.gate.weight": (7, 40),
        "backbone.layers.0.mixer.gate.e_score_correction_bias": (7,),
        "backbone.layers.0.mixer.experts.up_proj": (7, 128, 9),
        "backbone.layers.0.mixer.experts.down_proj": (7, 9, 128),
        "backbone.layers.0.mixer.shared_experts.up_proj.weight": (256, 40),
        "backbone.layers.0.mixer.shared_experts.down_proj.weight": (40, 256),
        "backbone.layers.0.mixer.fc1_latent_proj.weight": (9, 40),
        "backbone.layers.0.mixer.fc2_latent_proj.weight": (40, 9),
    }


def test_active_parameters_leave_out_the_idle_experts_at_their_latent_width() -> None:
    with torch.device("meta"):
        model = NemotronH(NemotronHConfig(hybrid_override_pattern="EME", hidden_size=40, **LATENT))
    total, active = model.num_parameters()
    assert total - active == 2 * (7 - 3) * 2 * 9 * 128


def test_a_block_without_latent_has_no_projections(make_model: Callable[..., NemotronH]) -> None:
    assert not [name for name in make_model("E").state_dict() if "latent" in name]


@pytest.mark.parametrize("pattern", ["E", "MEM*EME"])
def test_decoding_equals_the_whole_sequence(make_model: Callable[..., NemotronH], pattern: str) -> None:
    model = make_model(pattern, dtype=torch.float64, **LATENT)
    ids = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(ids).logits
        logits, cache = prefill(model, ids[:, :9], torch.ones(3, 9, dtype=torch.bool), 17)
        for t in range(9, 17):
            torch.testing.assert_close(logits, whole[:, t - 1], atol=1e-11, rtol=1e-11)
            logits = step(model, ids[:, t], cache)
        torch.testing.assert_close(logits, whole[:, -1], atol=1e-11, rtol=1e-11)


def test_packed_documents_equal_separate_ones(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("MEM*EME", dtype=torch.float64, **LATENT)
    ids = torch.randint(61, (1, 23), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        packed = model(ids, torch.tensor([[0] * 9 + [1] * 14])).logits
        alone = torch.cat([model(ids[:, :9]).logits, model(ids[:, 9:]).logits], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=1e-12)


def test_autocast_keeps_the_router_in_fp32(make_model: Callable[..., NemotronH]) -> None:
    """bf16 scores would choose other experts: outputs would then differ by whole experts, not by rounding."""
    moe = make_model("E", **LATENT).moe_blocks()[0]
    x = torch.randn(1, 200, 24, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = moe(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            out = moe(x)[0]
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 0.05


def test_it_learns(make_model: Callable[..., NemotronH]) -> None:
    """All parts of the block are in the optimiser's reach: 30 steps fit a batch that 0 steps do not."""
    torch.manual_seed(0)
    model = make_model("EME", **LATENT).train()
    ids = torch.randint(61, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
