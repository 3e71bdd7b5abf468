"""Next-token losses. Every function says what it divides by; logits are lifted to fp32 first.

Shapes: B sequences, L positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def token_losses(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of each position, fp32 [B, L]. `labels_BL` int64 [B, L] are the next tokens."""
    losses = F.cross_entropy(logits_BLV.float().flatten(0, 1), labels_BL.flatten(), reduction="none")
    return losses.view_as(labels_BL)


def next_token_loss(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Pretraining loss, a scalar in nats: mean over all B*L tokens of the batch."""
    return F.cross_entropy(logits_BLV.float().flatten(0, 1), labels_BL.flatten())


def selected_loss_sum(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Sum in nats over the T trained tokens, an fp32 scalar; logits of those positions only (`forward(select_BL=…)`).

    The caller divides by the number of trained tokens of the whole GLOBAL batch, over all micro-batches and ranks
    (`calculate_per_token_loss` of Megatron-Bridge): every assistant token then weighs the same, however tokens are
    spread over sequences. Averaging per micro-batch instead would favour tokens of sparsely trained ones.
    """
    return F.cross_entropy(logits_TV.float(), labels_T, reduction="sum")
