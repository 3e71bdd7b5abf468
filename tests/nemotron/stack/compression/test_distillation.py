"""Forward KL against autograd of the formula, torch's kl_div, and values that NeMo-RL's own loss gave."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.compression import distillation
from nemotron.stack.compression.distillation import forward_kl_sum, measure_recovery
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import Batch

CASES = json.loads((Path(__file__).parent / "recorded" / "distillation.json").read_text())["cases"]


def tensors(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    student = torch.randn(num_tokens, 13, dtype=dtype) * 3
    return student.requires_grad_(), torch.randn(num_tokens, 5, dtype=dtype), torch.randn(13, 5, dtype=dtype) * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8])
def test_value_and_gradient(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "CHUNK", 4)
    student, hidden, head = tensors(num_tokens)
    loss = forward_kl_sum(student, hidden, head) / 5
    (grad,) = torch.autograd.grad(loss, student)
    p = (hidden @ head.T).softmax(-1)
    plain = (p * (p.log() - student.softmax(-1).log())).sum() / 5
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(plain, student)[0], rtol=1e-12, atol=1e-12)
    library = F.kl_div(student.log_softmax(-1), p.log(), reduction="sum", log_target=True) / 5
    torch.testing.assert_close(loss, library, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(library, student)[0], rtol=1e-12, atol=1e-12)


def test_the_teacher_itself_has_nothing_to_learn() -> None:
    _, hidden, head = tensors(6)
    student = (hidden @ head.T + 4).requires_grad_()  # a constant is no difference
    loss = forward_kl_sum(student, hidden, head)
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert torch.autograd.grad(loss, student)[0].abs().max() < 1e-12


def test_one_tensor_of_logits_is_kept() -> None:
    student, hidden, head = tensors(600, torch.bfloat16)
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = forward_kl_sum(student * 1, hidden, head)
    large = [x for x in kept if x.numel() >= 600 * 13]
    assert loss.dtype == torch.float32 and [(x.shape, x.dtype) for x in large] == [(student.shape, torch.bfloat16)]


def test_a_second_backward_pass_fails_instead_of_scaling_twice() -> None:
    loss = 3 * forward_kl_sum(*tensors(6))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded(case: dict, dtype: torch.dtype) -> None:
    """NeMo-RL takes the KL over the teacher's k best tokens alone: ours over a vocabulary of these.

    Position t is scored where t + 1 is valid; the denominator is the number of valid tokens of the global batch.
    """
    inputs, outputs = case["inputs"], case["outputs"][str(dtype).removeprefix("torch.")]
    student = torch.tensor(inputs["student_logits"], dtype=dtype, requires_grad=True)
    teacher = torch.tensor(inputs["teacher_topk_logits"], dtype=dtype)
    mask = torch.tensor(inputs["token_mask"]).bool() & torch.tensor(inputs["sample_mask"]).bool()[:, None]
    valid = F.pad(mask[:, 1:], (0, 1))
    chosen = student.gather(-1, torch.tensor(inputs["teacher_topk_indices"]))[valid]
    loss = forward_kl_sum(chosen, teacher[valid], torch.eye(teacher.shape[-1], dtype=dtype))
    loss = loss / inputs["global_valid_toks"]
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    expected = torch.tensor(outputs["grad_logits"], dtype=dtype)
    assert loss.item() == pytest.approx(outputs["loss"], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(torch.autograd.grad(loss, student)[0], expected, rtol=tolerance, atol=tolerance)


def test_recovery_is_over_the_trained_tokens_of_all_batches(model: NemotronH, rows: list[Tensor]) -> None:
    student = copy.deepcopy(model)
    with torch.no_grad():
        student.lm_head.weight.mul_(0.7)
        student.backbone.norm_f.weight.add_(0.2 * torch.randn(24, dtype=torch.float64))
    batches, kls, hits, teacher_hits = list[Batch](), list[Tensor](), list[Tensor](), list[Tensor]()
    for ids_BL in rows:
        mask_BL = torch.arange(ids_BL.numel()).view_as(ids_BL) % 3 == 0
        logits_BLV, teacher_BLV = student(ids_BL).logits, model(ids_BL).logits
        labels_BL = torch.where(mask_BL & (ids_BL % 2 == 0), logits_BLV.argmax(-1), teacher_BLV.argmax(-1))
        batches.append(Batch(ids_BL, labels_BL, mask_BL.long()))
        p, q = teacher_BLV.softmax(-1)[mask_BL], logits_BLV.softmax(-1)[mask_BL]
        kls.append((p * (p / q).log()).sum(-1))
        hits.append((logits_BLV.argmax(-1) == labels_BL)[mask_BL])
        teacher_hits.append((teacher_BLV.argmax(-1) == labels_BL)[mask_BL])
    found = measure_recovery(student, model, batches)
    assert found.kl == pytest.approx(torch.cat(kls).mean().item(), rel=1e-10)
    assert found.accuracy == pytest.approx(torch.cat(hits).double().mean().item())
    assert found.teacher_accuracy == pytest.approx(torch.cat(teacher_hits).double().mean().item())
    assert found.teacher_accuracy < 1
    nothing = [Batch(ids_BL, ids_BL, torch.zeros_like(ids_BL)) for ids_BL in rows]
    with pytest.raises(ValueError, match="no token is trained"):
        measure_recovery(student, model, nothing)
