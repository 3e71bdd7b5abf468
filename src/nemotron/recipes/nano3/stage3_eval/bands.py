"""Expected numbers, and whether an evaluation is inside them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class BandCheck:
    """One number with its bound. A number that could not be measured is None, and outside."""

    name: str
    value: float | None
    relation: Literal[">=", "<="]
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the number is inside."""
        if self.value is None or math.isnan(self.value):
            return False
        return self.value >= self.bound if self.relation == ">=" else self.value <= self.bound

    def line(self) -> str:
        """`sft.greedy_mean 0.680 (>= 0.7)`."""
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        return f"{self.name} {value} ({self.relation} {self.bound:g})"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for the Results."""
        return {**asdict(self), "passed": self.passed}


def check_bands(bands: dict[str, dict[str, float | None]], metrics: dict[str, Any]) -> list[BandCheck]:
    """Hold the metrics of `evaluate.py` against the `bands` of its config, as a nested dict; null bounds are skipped.

    The bands of a model that was not evaluated are skipped too. Field names end in `_min` or `_max`.
    """
    values = measured(metrics)
    checks = []
    for role, bounds in bands.items():
        for field, bound in bounds.items():
            quantity, end = field.rsplit("_", 1)
            name = f"{role}.{quantity}"
            if bound is not None and name in values:
                checks.append(BandCheck(name, values[name], ">=" if end == "min" else "<=", bound))
    return checks


def measured(metrics: dict[str, Any]) -> dict[str, float | None]:
    """The numbers that have bands, of the models that were evaluated; None where something else was missing."""
    models, pretrain, tasks = metrics["models"], metrics["pretrain_text"], metrics["tasks"]
    values: dict[str, float | None] = {}
    if "base" in models:
        bits = text_bits_per_byte(pretrain, "bits_per_byte")
        trigram = text_bits_per_byte(pretrain, "trigram_bits_per_byte")
        values["base.below_trigram"] = None if bits is None or trigram is None else trigram - bits
    if "sft" in models:
        families = tasks["sft"]["families"]
        values["sft.greedy_mean"] = tasks["sft"]["mean"]["greedy"]
        values["sft.family_above_constant"] = min(
            scores["greedy"] - metrics["baselines"][family]["constant"] for family, scores in families.items()
        )
        above_base = _comparison(metrics, "sft - base", "greedy")
        values["sft.family_above_base"] = above_base and min(
            entry["difference"] for entry in above_base["families"].values()
        )
        text = metrics["text"]
        values["sft.bpb_over_base"] = max(
            (bits - text["base"][source] for source, bits in text["sft"].items() if source in text.get("base", {})),
            default=None,
        )
    for role in {"rl", "swe2", "final", "healed"} & models.keys():
        sampled, greedy = (_comparison(metrics, f"{role} - sft", which) for which in ("sampled", "greedy"))
        values[f"{role}.sampled_gain"] = sampled and sampled["mean"]["difference"]
        values[f"{role}.sampled_gain_low"] = sampled and sampled["mean"]["difference_95"][0]
        values[f"{role}.families_worse"] = sampled and float(len(sampled["worse"]))
        values[f"{role}.greedy_gain"] = greedy and greedy["mean"]["difference"]
    for role in {"quantized", "qad"} & models.keys():
        sampled = _comparison(metrics, f"{role} - healed", "sampled")
        values[f"{role}.sampled_loss"] = sampled and -sampled["mean"]["difference"]
        values[f"{role}.gain_high"] = sampled and sampled["mean"]["difference_95"][1]
    if "healed" in models:
        lengths = metrics["acceptance_length"].values()
        values["healed.acceptance_length"] = min((each["after"] for each in lengths), default=None)
        values["healed.acceptance_gain"] = min((each["after"] - each["before"] for each in lengths), default=None)
    return values


def _comparison(metrics: dict[str, Any], pair: str, which: str) -> Any:
    """One paired comparison, or None where it was not made."""
    return metrics["comparisons"].get(pair, {}).get(which)


def text_bits_per_byte(text: dict[str, dict[str, float]], key: str) -> float | None:
    """Bits per byte over all sources together: the mean weighted by their bytes. None if a source lacks the number."""
    if not text or any(key not in scores for scores in text.values()):
        return None
    total = sum(scores["bytes"] for scores in text.values())
    return sum(scores[key] * scores["bytes"] for scores in text.values()) / total
