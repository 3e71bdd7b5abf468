"""The DPO loss: a chosen answer is to gain probability on a rejected one, compared with a reference model.

Shapes: P pairs; S = 2 P sequences, chosen and rejected by turns; T completion tokens of all, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.kit.schemas.rl import DPOLossConfig
from nemotron.stack.training.distributed import Ranks, sum_metrics


@dataclass
class DPOLoss:
    """`loss` is a sum over pairs: the caller divides by the number of pairs of the whole global batch.

    The others are of each pair, in nats and without gradient. preference_P, sft_P: the two terms without their factors.
    chosen_P, rejected_P: what each answer gained on the reference. NeMo-RL logs their means as rewards_chosen_mean and
    rewards_rejected_mean, and as accuracy the share of pairs in which the chosen answer gained more; a tie is wrong.
    """

    loss: Tensor
    preference_P: Tensor
    sft_P: Tensor
    chosen_P: Tensor
    rejected_P: Tensor


def dpo_loss(logp_T: Tensor, logp_reference_T: Tensor, lengths_S: Sequence[int], cfg: DPOLossConfig) -> DPOLoss:
    """Sum over pairs of -w log sigmoid(beta (gain of the chosen - gain of the rejected)) + w_sft NLL(chosen).

    The gain of an answer is its log-probability under the policy less that under the reference, summed over its tokens
    (Rafailov et al. 2023, equation 7). The second term keeps the chosen answer from losing probability, too.

    Args:
        logp_T: log-probabilities of the answers' tokens under the policy, with gradient.
        logp_reference_T: the same under the reference.
        lengths_S: tokens of each answer, chosen and rejected by turns.
    """
    logp_S = _sums(logp_T, lengths_S)
    gains_S = logp_S - _sums(logp_reference_T, lengths_S)
    chosen_P, rejected_P = gains_S[::2], gains_S[1::2]
    preference_P = -F.logsigmoid(cfg.reference_policy_kl_penalty * (chosen_P - rejected_P))
    sft_P = -logp_S[::2]
    loss_P = cfg.preference_loss_weight * preference_P + cfg.sft_loss_weight * sft_P
    return DPOLoss(loss_P.sum(), preference_P.detach(), sft_P.detach(), chosen_P.detach(), rejected_P.detach())


def _sums(values_T: Tensor, lengths_S: Sequence[int]) -> Tensor:
    return torch.stack([part.sum() for part in values_T.split(list(lengths_S))])


class PairRecord:
    """Adds up what the micro-batches of a batch measure, on this rank; `metrics` is over all ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = dict.fromkeys(
            ("pairs", "trained_tokens", "loss", "preference_loss", "sft_loss", "accuracy", "chosen", "rejected"), 0.0
        )

    def add(self, loss: DPOLoss, trained_tokens: int) -> None:
        """Count the pairs of a micro-batch, and the tokens of the rows that hold them."""
        values: dict[str, Tensor | float] = {
            "pairs": len(loss.chosen_P),
            "trained_tokens": trained_tokens,
            "loss": loss.loss.detach(),
            "preference_loss": loss.preference_P.sum(),
            "sft_loss": loss.sft_P.sum(),
            "accuracy": (loss.chosen_P > loss.rejected_P).sum(),
            "chosen": loss.chosen_P.sum(),
            "rejected": loss.rejected_P.sum(),
        }
        for name, value in values.items():
            self.sums[name] += value

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over the pairs of the whole batch."""
        sums = sum_metrics(self.sums, ranks)
        means = {name: value / max(sums["pairs"], 1) for name, value in sums.items()}
        return {
            **{name: means[name] for name in ("loss", "preference_loss", "sft_loss", "accuracy")},
            "rewards_chosen_mean": means["chosen"],
            "rewards_rejected_mean": means["rejected"],
            "rewards_margin_mean": means["chosen"] - means["rejected"],
            "num_valid_samples": sums["pairs"],
            "trained_tokens": sums["trained_tokens"],
        }
