"""Learning rates against values worked out by hand from the published shapes."""

from __future__ import annotations

import itertools
import math

import pytest

from nemotron.stack.training.schedule import Schedule, lr_at


def test_wsd_linear_has_the_published_shape() -> None:
    # Nano 3: warm-up, constant for 80 %, linear decay over the last 20 % to 1e-5 of a peak of 1e-3.
    schedule = Schedule(1e-3, 1e-5, 1000, lr_warmup_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=200)
    rates = [lr_at(step, schedule) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[4] == pytest.approx(5e-4)
    assert rates[9:800] == [1e-3] * 791
    assert rates[899] == pytest.approx((1e-3 + 1e-5) / 2)  # half of the decay
    assert rates[999] == pytest.approx(1e-5, rel=1e-12)
    steps_down = [a - b for a, b in itertools.pairwise(rates[800:])]
    assert steps_down == pytest.approx([(1e-3 - 1e-5) / 200] * 199)


def test_minus_sqrt_falls_by_half_in_the_first_quarter() -> None:
    schedule = Schedule(1.0, 0.0, 500, lr_wsd_decay_iters=400, lr_wsd_decay_style="minus_sqrt")
    assert lr_at(99, schedule) == 1.0
    assert lr_at(199, schedule) == pytest.approx(0.5)  # sqrt(1/4)
    assert lr_at(499, schedule) == pytest.approx(0.0, abs=1e-12)


def test_cosine_is_symmetric_about_its_middle() -> None:
    schedule = Schedule(3.0, 1.0, 110, lr_warmup_iters=10, lr_decay_style="cosine")
    assert lr_at(59, schedule) == pytest.approx(2.0)
    assert lr_at(34, schedule) - 2.0 == pytest.approx(math.cos(math.pi / 4))
    assert lr_at(34, schedule) - 2.0 == pytest.approx(2.0 - lr_at(84, schedule))
    assert lr_at(109, schedule) == pytest.approx(1.0)


def test_constant_after_warm_up_and_beyond_the_end() -> None:
    schedule = Schedule(2e-5, 0.0, 20, lr_warmup_iters=4, lr_decay_style="constant")
    assert [lr_at(step, schedule) for step in (0, 3, 4, 19, 500)] == pytest.approx([5e-6, 2e-5, 2e-5, 2e-5, 2e-5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_warmup_iters": 90, "lr_wsd_decay_iters": 20}, "do not fit"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"train_iters": 0}, "train_iters"),
        ({"lr_decay_style": "linear"}, "lr_decay_style"),
        ({"lr_wsd_decay_style": "exponential"}, "lr_wsd_decay_style"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"lr": 1e-3, "min_lr": 0.0, "train_iters": 100} | changes
    with pytest.raises(ValueError, match=message):
        Schedule(**values)  # type: ignore[arg-type]
