"""Two models on the same tasks: paired differences, of the mean over the families and of each family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from nemotron.stack.evaluation.intervals import Difference, holm, paired_difference
from nemotron.stack.evaluation.scoring import Evaluation


@dataclass(frozen=True)
class Comparison:
    """`after - before` on the same tasks: of the mean over families, and of each family, Holm-corrected over them."""

    mean: Difference
    families: dict[str, Difference]

    def worse(self) -> list[str]:
        """Families that lost, after correction for testing all of them at family-wise error 0.05."""
        return [name for name, d in self.families.items() if d.estimate < 0 and d.p_adjusted < 0.05]

    def metrics(self) -> dict[str, Any]:
        """The comparison as plain JSON."""
        return {
            "mean": _difference_entry(self.mean),
            "families": {name: _difference_entry(difference) for name, difference in self.families.items()},
            "worse": self.worse(),
        }


def _difference_entry(difference: Difference) -> dict[str, Any]:
    return {
        "difference": difference.estimate,
        "difference_95": [difference.low, difference.high],
        "p": difference.p_value,
        "p_holm": difference.p_adjusted,
    }


def compare(before: Evaluation, after: Evaluation, which: Literal["greedy", "sampled"]) -> Comparison:
    """Paired comparison of two models on the same tasks in the same order; anything else raises ValueError."""
    if [task.canonical for task in before.tasks] != [task.canonical for task in after.tasks]:
        raise ValueError("the two evaluations hold different tasks")
    first, second = before.strata(which), after.strata(which)
    single = [paired_difference([a], [b]) for a, b in zip(first, second, strict=True)]
    adjusted = holm([difference.p_value for difference in single])
    families = {
        family: replace(difference, p_adjusted=p)
        for family, difference, p in zip(before.families, single, adjusted, strict=True)
    }
    return Comparison(paired_difference(first, second), families)
