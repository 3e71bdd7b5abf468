"""What is measured at the tokens of a loss, above all how far trainer and generator are apart. Names are NeMo-RL's.

The generator that drew the tokens and the trainer that computes the gradient are to be one policy. Other kernels,
another precision or a mistake make them two, and training gets worse without a word; these numbers say so first.
docs/guides/rl-metrics.md has the values that mean trouble.

Shapes: T completion tokens; S sequences, one after another in T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.stack.rl.losses import PolicyLoss, kl_estimate
from nemotron.stack.training.distributed import Ranks, max_metrics, sum_metrics

TOKEN_METRICS = (
    "probs_ratio", "probs_ratio_clamped", "sampling_importance_ratio", "is_oob_ratio", "kl_penalty",
    "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "approx_entropy",
)  # fmt: skip
# A factor that rounding in fp32 does not reach: another expert at a tie of a router, or two policies.
MISMATCH_FACTOR = 1.001
_EXTREMES = ("probs_ratio", "probs_ratio_clamped", "seq_mult_prob_error")


def sequence_errors(logp_T: Tensor, logp_generator_T: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """exp|logp - logp_generator|, the factor between the two probabilities, as a mean over each sequence's tokens: [S].

    1 where both agree.
    """
    factors = torch.exp((logp_T - logp_generator_T).abs()).detach().split(list(lengths_S))
    return torch.stack([factor.mean() for factor in factors])


def sequences_within(errors_S: Tensor, threshold: float | None) -> Tensor:
    """Which sequences stay in the loss, bool [S]: those whose error is a number of at most `threshold`; None: all."""
    return torch.ones_like(errors_S, dtype=torch.bool) if threshold is None else errors_S <= threshold


def token_metrics(
    loss: PolicyLoss, logp_T: Tensor, cfg: ClippedPGLossConfig, *, logp_old_T: Tensor, logp_generator_T: Tensor
) -> dict[str, Tensor]:
    """Each of TOKEN_METRICS at every token, [T], without gradient.

    probs_ratio, probs_ratio_clamped, sampling_importance_ratio, is_oob_ratio, kl_penalty: the fields of `PolicyLoss`.
    token_mult_prob_error: the factor of `sequence_errors`. gen_kl_error, policy_kl_error: KL of the generator to the
    trainer and back, both estimated at the tokens of the generator. js_divergence_error: mean of the KL of their
    mixture to both. approx_entropy: -exp(logp - logp_generator) logp, the entropy of the policy estimated from samples.
    """
    kind = cfg.reference_policy_kl_type
    logp_T, difference_T = logp_T.detach(), (logp_old_T - logp_generator_T).detach()
    # log p_old - log m and log p_generator - log m, with the mixture m = (p_old + p_generator) / 2
    old_T, generator_T = -torch.log1p(torch.expm1(-difference_T) / 2), -torch.log1p(torch.expm1(difference_T) / 2)
    return {
        "probs_ratio": loss.ratio_T,
        "probs_ratio_clamped": loss.clamped_T,
        "sampling_importance_ratio": loss.importance_T,
        "is_oob_ratio": loss.out_of_bounds_T,
        "kl_penalty": loss.kl_T,
        "token_mult_prob_error": torch.exp(difference_T.abs()),
        "gen_kl_error": kl_estimate(difference_T, kind),
        "policy_kl_error": kl_estimate(-difference_T, kind),
        "js_divergence_error": (kl_estimate(old_T, "k3") + kl_estimate(generator_T, "k3")) / 2,
        "approx_entropy": -torch.exp(logp_T - logp_generator_T) * logp_T,
    }


class LossRecord:
    """Adds up what the micro-batches of one update measure, on this rank; `metrics` is over all ranks.

    Args:
        num_samples: completions that may count in the loss.
    """

    def __init__(self, num_samples: int) -> None:
        names = (
            *TOKEN_METRICS,
            "tokens",
            "trained_tokens",
            "sequences",
            "seq_mult_prob_error",
            "num_masked_seqs",
            "masked_correct",
            "num_mismatched_tokens",
            "mtp_nats",
            "mtp_tokens",
        )
        self.sums: dict[str, Tensor | float] = {**dict.fromkeys(names, 0.0), "num_valid_samples": num_samples}
        self.maxima = {f"{sign}{name}": -math.inf for name in _EXTREMES for sign in "+-"}

    def add_sequences(self, errors_S: Tensor, kept_S: Tensor, rewards_S: Tensor, trained_tokens: int) -> None:
        """Count sequences, those that `sequences_within` left out, and the tokens of the rows that hold them.

        Right is a reward of exactly 1, which it is where rewards are unshaped verdicts.
        """
        self._extend("seq_mult_prob_error", errors_S)
        counts: dict[str, Tensor | float] = {
            "sequences": len(errors_S),
            "trained_tokens": trained_tokens,
            "seq_mult_prob_error": errors_S.sum(),
            "num_masked_seqs": (~kept_S).sum(),
            "num_valid_samples": -(~kept_S).sum(),
            "masked_correct": (~kept_S & (rewards_S == 1)).sum(),
        }
        for name, count in counts.items():
            self.sums[name] += count

    def add_tokens(self, values: dict[str, Tensor]) -> None:
        """Count the tokens in the loss, `values` of `token_metrics`."""
        self.sums["tokens"] += len(values["probs_ratio"])
        self.sums["num_mismatched_tokens"] += (values["token_mult_prob_error"] > MISMATCH_FACTOR).sum()
        for name, values_T in values.items():
            self.sums[name] += values_T.sum()
            if name in _EXTREMES:
                self._extend(name, values_T)

    def add_mtp(self, sums_K: Tensor, counts_K: Tensor) -> None:
        """Count the loss of multi-token prediction: nats and tokens of each depth."""
        self.sums["mtp_nats"] += sums_K.detach().sum()
        self.sums["mtp_tokens"] += counts_K.sum()

    def _extend(self, name: str, values: Tensor) -> None:
        for sign, signed in (("+", values), ("-", -values)):
            if len(values):
                self.maxima[sign + name] = max(self.maxima[sign + name], signed.max().item())

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Means over tokens or sequences of the whole batch, and extremes, absent where there was no token."""
        sums, maxima = sum_metrics(self.sums, ranks), max_metrics(self.maxima, ranks)
        extremes: dict[str, float] = {}
        for name in _EXTREMES:
            low, high = -maxima[f"-{name}"], maxima[f"+{name}"]
            if low <= high:
                prefixed = name == "seq_mult_prob_error"
                extremes |= {f"min_{name}" if prefixed else f"{name}_min": low}
                extremes |= {f"max_{name}" if prefixed else f"{name}_max": high}
        return {
            **{name: sums[name] / max(sums["tokens"], 1) for name in TOKEN_METRICS},
            "mean_seq_mult_prob_error": sums["seq_mult_prob_error"] / max(sums["sequences"], 1),
            **extremes,
            **{
                name: sums[name]
                for name in ("num_mismatched_tokens", "num_valid_samples", "num_masked_seqs", "trained_tokens")
            },
            "masked_correct_pct": sums["masked_correct"] / max(sums["num_masked_seqs"], 1),
            **({"mtp_loss": sums["mtp_nats"] / sums["mtp_tokens"]} if sums["mtp_tokens"] else {}),
        }
