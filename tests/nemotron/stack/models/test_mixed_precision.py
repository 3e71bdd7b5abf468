"""Training under bf16 autocast: it runs, its gradients are the fp32 ones within bf16, and the router stays in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cuda_autocast import CudaAutocast
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.kernels import experts


def loss_of(model: NemotronH, bf16: bool) -> Tensor:
    source = torch.Generator().manual_seed(2)
    ids, seq_idx = torch.randint(61, (4, 40), generator=source), torch.arange(40).div(13, rounding_mode="floor")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = model(ids, seq_idx.expand(4, -1))
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()) + out.load_balancing_loss


@pytest.mark.parametrize("pattern", ["M", "*", "E", "-", "M*-"])
def test_gradients_are_those_of_fp32_within_bf16(make_model: Callable[..., NemotronH], pattern: str) -> None:
    model = make_model(pattern).train()
    parameters = dict(model.named_parameters())
    exact, rounded = loss_of(model, False), loss_of(model, True)
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    assert rounded.item() != exact.item()
    pairs = zip(
        torch.autograd.grad(rounded, list(parameters.values())),
        torch.autograd.grad(exact, list(parameters.values())),
        strict=True,
    )
    for name, (one, other) in zip(parameters, pairs, strict=True):
        assert one.dtype == torch.float32
        # bf16 has 8 bits. Where a rounded score moves a token to another expert, its gradient moves with it.
        assert (one - other).norm() < (0.25 if pattern == "E" else 0.15) * other.norm(), name


def test_router_scores_and_choices_are_fp32_under_autocast(make_model: Callable[..., NemotronH]) -> None:
    gate = make_model("E").moe_blocks()[0].gate
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        weights, chosen, scores = gate(x)
    expected_weights, expected_chosen, expected_scores = gate(x)
    assert weights.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected_scores)
    assert torch.equal(chosen, expected_chosen)
    torch.testing.assert_close(weights, expected_weights)


def test_weights_in_bf16_need_no_autocast(make_model: Callable[..., NemotronH]) -> None:
    """As `from_pretrained(folder, torch.bfloat16)` has them, and an exported folder: forward, gradient and decoding."""
    model = make_model("M*E-").bfloat16()
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(4))
    logits = model(ids).logits
    logits.float().sum().backward()
    assert logits.dtype == torch.bfloat16 and all(p.grad is not None for p in model.parameters() if p.requires_grad)
    (tokens,) = generate(model, ids[:1].tolist(), 3, temperature=0, stop_token_ids=()).tokens
    assert tokens[0] == int(model(ids[:1]).logits[0, -1].argmax())


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("latent", [None, 16])
def test_autocast_of_a_gpu_which_squares_and_sums_in_fp32(
    make_model: Callable[..., NemotronH],
    monkeypatch: pytest.MonkeyPatch,
    implementation: experts.Implementation,
    latent: int | None,
) -> None:
    """Also around the gradient, where PyTorch advises against it."""
    monkeypatch.setattr(experts, "choose_implementation", lambda *of: (1, implementation))
    sizes = {"moe_latent_size": latent, "moe_intermediate_size": 16}
    model = make_model("ME*-", **sizes).train()
    parameters = list(model.parameters())
    exact = loss_of(model, False)
    expected = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(exact, parameters)])
    with CudaAutocast():
        rounded = loss_of(model, True)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(rounded, parameters)])
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    assert rounded.item() != exact.item()
    assert (found - expected).norm() < 0.2 * expected.norm()
