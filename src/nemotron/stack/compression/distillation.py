"""A pruned model learns from the full one: forward KL over the whole vocabulary, temperature 1, and no other loss.

That is the loss of Minitron and of Nemotron Nano 2 (arXiv 2407.14679, section 3; arXiv 2508.14444).

Shapes: T tokens, E hidden size of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron.stack.models import NemotronH
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.training.loaders import Batch

# Tokens that are worked on at once: 256 x 131,072 fp32 numbers are 128 MiB.
CHUNK = 256


def forward_kl_sum(student_TV: Tensor, teacher_hidden_TE: Tensor, teacher_head_VE: Tensor) -> Tensor:
    """sum_t sum_v p_t(v) (log p_t(v) - log q_t(v)) in nats, a scalar, fp32 at least; p the teacher's, q the student's.

    The caller divides by the number of valid tokens of the whole GLOBAL batch, as with `losses.selected_loss_sum`:
    each of them then weighs the same, and micro-batches and ranks add up. Give the valid tokens only:

        student_TV = student(input_ids_BL, seq_idx_BL, select_BL=valid_BL).logits
        with torch.no_grad():
            teacher_hidden_TE = teacher.hidden_states(input_ids_BL, seq_idx_BL)[0][valid_BL]
        loss = forward_kl_sum(student_TV, teacher_hidden_TE, teacher.lm_head.weight) / num_valid_tokens

    The teacher's logits exist for 256 tokens at a time. Kept for the backward pass is one tensor [T, V], the gradient
    q - p, in the student's dtype, to which only the chunk's intermediate tensors come. A second backward pass through
    the same loss fails. The teacher gets no gradient.

    Args:
        student_TV: the student's logits.
        teacher_hidden_TE: the teacher's hidden states after its final norm.
        teacher_head_VE: the weight of its output head.
    """
    loss: Tensor = ForwardKL.apply(student_TV, teacher_hidden_TE, teacher_head_VE)
    return loss


class ForwardKL(torch.autograd.Function):
    """The sum, and its gradient in the student's logits, softmax(student) - softmax(teacher), in one pass."""

    @staticmethod
    def forward(ctx: Any, student_TV: Tensor, teacher_hidden_TE: Tensor, teacher_head_VE: Tensor) -> Tensor:
        head_EV = teacher_head_VE.to(teacher_hidden_TE.dtype).T
        total = at_least_fp32(student_TV.new_zeros(()))
        grad_TV = torch.empty_like(student_TV) if ctx.needs_input_grad[0] else None
        for start in range(0, len(student_TV), CHUNK):
            rows = slice(start, start + CHUNK)
            teacher_logits = teacher_hidden_TE[rows] @ head_EV
            log_p = at_least_fp32(teacher_logits).log_softmax(-1)
            log_q = at_least_fp32(student_TV[rows]).log_softmax(-1)
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum()
            if grad_TV is not None:
                grad_TV[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(grad_TV)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_TV,) = ctx.saved_tensors
        # In place: autograd notices where somebody asks for it a second time.
        return grad_TV.mul_(grads[0]), None, None


@dataclass(frozen=True)
class Recovery:
    """How near a student is to its teacher, over the trained tokens of rows that neither has seen.

    kl: nats a token, forward. accuracy, teacher_accuracy: share of the next tokens that are the likeliest.
    """

    kl: float
    accuracy: float
    teacher_accuracy: float


@torch.no_grad()
def measure_recovery(student: NemotronH, teacher: NemotronH, batches: Iterable[Batch]) -> Recovery:
    """`Recovery` over the tokens that `loss_mask_BL` marks. ValueError: it marks none. Leaves both in eval mode."""
    student.eval()
    teacher.eval()
    kl = right = teacher_right = num_tokens = 0.0
    for batch in batches:
        trained_BL = batch.loss_mask_BL.bool()
        labels_T = batch.labels_BL[trained_BL]
        teacher_TE = teacher.hidden_states(batch.input_ids_BL, batch.seq_idx_BL)[0][trained_BL]
        student_TV = student(batch.input_ids_BL, batch.seq_idx_BL, trained_BL).logits
        kl += forward_kl_sum(student_TV, teacher_TE, teacher.lm_head.weight).item()
        right += (student_TV.argmax(-1) == labels_T).sum().item()
        teacher_right += (teacher.lm_head(teacher_TE).argmax(-1) == labels_T).sum().item()
        num_tokens += len(labels_T)
    if not num_tokens:
        raise ValueError("no token is trained in these batches")
    return Recovery(kl / num_tokens, right / num_tokens, teacher_right / num_tokens)
