"""What each stage reached, in a few numbers: the table at the end of the whole recipe, and what bands are set on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODES = ("reasoning_on", "reasoning_off")
FAMILIES_AND_MODES = "pass@1 on held-out tasks, mean over five families, with reasoning and without"


def mean_score(metrics: Mapping[str, Any], how: str) -> float:
    """What stage 1's evaluation counted, `how` is greedy or sampled: mean over families and both modes."""
    return sum(float(metrics[mode]["tasks"]["mean"][how]) for mode in MODES) / len(MODES)


def summarise(
    pretrain: Mapping[str, Any], sft: Mapping[str, Any], rl: Mapping[str, Any], compress: Mapping[str, Any]
) -> dict[str, float]:
    """The numbers, by name, from the metrics of the four evaluations: more is better, but of parameters and bytes."""
    numbers = {
        f"bits per byte less than the trigram model's, {source}": entry["trigram_bits_per_byte"]
        - entry["bits_per_byte"]
        for source, entry in pretrain["text"].items()
    }
    for how in ("greedy", "sampled"):
        numbers[f"SFT, {how}"] = mean_score(sft, how)
        numbers[f"RL, {how}"] = mean_score(rl["tasks"]["after"], how)
    numbers |= {f"compressed, share of {what}": share for what, share in compress["kept"].items()}
    return numbers


def table(numbers: Mapping[str, float]) -> str:
    """A line for each."""
    width = max(map(len, numbers))
    return "\n".join(
        [f"{name:{width}}  {value:.3f}" for name, value in numbers.items()] + [f"SFT, RL: {FAMILIES_AND_MODES}"]
    )
