"""What each stage reached, in a few numbers: the table at the end of the whole recipe, and what bands are set on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron.recipes.nano2.stage1_sft.evaluation import MODES

FAMILIES_AND_MODES = "pass@1 on held-out tasks, mean over five families, with reasoning and without"


def mean_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What stage 1's evaluation counted, greedy and, where it sampled, sampled: mean over families and both modes."""
    means = [metrics[mode]["tasks"]["mean"] for mode in MODES]
    return {how: sum(mean[how] for mean in means) / len(MODES) for how in ("greedy", "sampled") if how in means[0]}


def summarise(
    pretrain: Mapping[str, Any], sft: Mapping[str, Any], rl: Mapping[str, Any], compress: Mapping[str, Any]
) -> dict[str, float]:
    """The numbers, by name, from the metrics of the four evaluations: more is better, but of parameters and bytes."""
    numbers = {
        f"bits per byte less than the trigram model's, {source}": entry["trigram_bits_per_byte"]
        - entry["bits_per_byte"]
        for source, entry in pretrain["text"].items()
        if "trigram_bits_per_byte" in entry  # not where it was left out, or a source has too little text
    }
    for name, metrics in (("SFT", sft), ("RL", rl["tasks"]["after"])):
        numbers |= {f"{name}, {how}": score for how, score in mean_scores(metrics).items()}
    numbers |= {f"compressed, share of {what}": share for what, share in compress["kept"].items()}
    return numbers


def table(numbers: Mapping[str, float]) -> str:
    """A line for each."""
    width = max(map(len, numbers))
    return "\n".join(
        [f"{name:{width}}  {value:.3f}" for name, value in numbers.items()] + [f"SFT, RL: {FAMILIES_AND_MODES}"]
    )
