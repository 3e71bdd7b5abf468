"""Next-token losses. Every function says what it divides by; logits are lifted to fp32 first.

Shapes: B sequences, L positions, V vocabulary, T trained tokens, K depths of multi-token prediction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.mtp import shift_left

# Label of positions without a next token, as in torch's cross entropy.
IGNORED = -100


def token_losses(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of each position, fp32 [B, L]. `labels_BL` int64 [B, L] are the next tokens."""
    losses = F.cross_entropy(at_least_fp32(logits_BLV).flatten(0, 1), labels_BL.flatten(), reduction="none")
    return losses.view_as(labels_BL)


def next_token_loss(logits_BLV: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
    """Pretraining loss, a scalar in nats: mean over all B*L tokens of the batch (but those labelled IGNORED)."""
    return F.cross_entropy(at_least_fp32(logits_BLV).flatten(0, 1), labels_BL.flatten())


def selected_loss_sum(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, weights_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum in nats over the T trained tokens, an fp32 scalar; logits of those positions only (`forward(select_BL=…)`).

    The caller divides by the number of trained tokens of the whole GLOBAL batch, over all micro-batches and ranks
    (`calculate_per_token_loss` of Megatron-Bridge): every assistant token then weighs the same, however tokens are
    spread over sequences. Averaging per micro-batch instead would favour tokens of sparsely trained ones.

    With `weights_T`, floats, each token's loss is multiplied by its weight, and the caller divides by the sum of
    weights: weight 2 is the token twice. Integers are a mask, which is 1 at every token selected, and change nothing.
    """
    if weights_T is None or not weights_T.is_floating_point():
        return F.cross_entropy(at_least_fp32(logits_TV), labels_T, reduction="sum")
    return (F.cross_entropy(at_least_fp32(logits_TV), labels_T, reduction="none") * weights_T).sum()


def mtp_loss_sums(
    mtp_logits: list[torch.Tensor],
    labels_BL: torch.Tensor,
    seq_idx_BL: torch.Tensor | None = None,
    select_BL: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-token prediction: sum in nats and number of trained tokens of each depth, two fp32 tensors [K].

    Depth k at position t is scored on the label of position t+k, where that position is in the same document and
    selected. The loss is `mtp_loss_scaling_factor` (Nemotron 3 Super: 0.3) times the mean over depths of sum / count,
    the counts taken over the whole GLOBAL batch as in `selected_loss_sum`.

    Args:
        mtp_logits: `NemotronHOutput.mtp_logits`: [B, L, V] a depth, or [selected of that depth, V] with `select_BL`.
        labels_BL: next tokens of the trunk's positions, int64, as for the next-token loss.
        seq_idx_BL, select_BL: what the forward pass was given.
    """
    sums, counts = [], []
    for depth, logits in enumerate(mtp_logits, start=1):
        later_BL = shift_left(labels_BL, depth, seq_idx_BL, fill=IGNORED)
        if select_BL is not None:
            later = later_BL[shift_left(select_BL, depth, seq_idx_BL, fill=False)]
        else:
            later, logits = later_BL.flatten(), logits.flatten(0, 1)
        sums.append(F.cross_entropy(at_least_fp32(logits), later, ignore_index=IGNORED, reduction="sum"))
        counts.append((later != IGNORED).sum())
    return torch.stack(sums), torch.stack(counts).float()


def mtp_trained_tokens(select_BL: torch.Tensor, seq_idx_BL: torch.Tensor | None, num_depths: int) -> torch.Tensor:
    """The counts of `mtp_loss_sums` without a forward pass, fp32 [K]; a label IGNORED at a selected position counts.

    The loss of each micro-batch is divided by the counts of the whole global batch, so they are needed before the first
    forward pass.
    """
    return torch.stack(
        [shift_left(select_BL, depth, seq_idx_BL, fill=False).sum() for depth in range(1, num_depths + 1)]
        or [select_BL.new_zeros(0, dtype=torch.int64)]
    ).float()


def mtp_loss(
    mtp_logits: list[torch.Tensor],
    labels_BL: torch.Tensor,
    seq_idx_BL: torch.Tensor | None = None,
    select_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multi-token prediction loss, a scalar in nats: each depth's mean over its own trained tokens, then over depths.

    Multiply by 0.3 for Nemotron 3 Super. Averages over THIS batch; where counts differ between micro-batches use
    `mtp_loss_sums` and divide by those of the global batch. Raises ValueError where multi-token prediction did not run.
    """
    if not mtp_logits:
        raise ValueError("no mtp_logits: the model has no multi-token prediction block, or was not in training mode")
    sums, counts = mtp_loss_sums(mtp_logits, labels_BL, seq_idx_BL, select_BL)
    return (sums / counts.clamp(min=1)).mean()
