"""Charts of the report: ticks are round, points land where they belong, text is escaped, the SVG is well-formed XML."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.recipes.tools.runs_plot import text_plot
from nemotron.recipes.tools.svg import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Interval,
    Series,
    interval_chart,
    line_chart,
    number,
    smooth,
    ticks,
)


def parse(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1.3, 2.2, [1.4, 1.6, 1.8, 2.0, 2.2]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_stay_within_the_range_and_are_few(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    assert 1 <= len(found) <= 12
    slack = span * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1_200_000, "1.2M"), (1500, "1.5k"), (12_345, "12.345k"), (0.25, "0.25"), (0, "0"), (-2000, "-2k")],
)
def test_numbers_on_an_axis(value: float, text: str) -> None:
    assert number(value) == text


def test_smoothing_keeps_a_straight_line_but_for_its_end_and_a_level_one_whole() -> None:
    line = [(float(x), 3.0 * x + 1) for x in range(100)]
    smoothed = smooth(line, 0.2)
    assert [x for x, _ in smoothed] == [x for x, _ in line]
    assert [y for _, y in smoothed[:90]] == pytest.approx([y for _, y in line[:90]])
    assert smooth([(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]) == [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]


def test_smoothing_averages_the_noise_at_the_end() -> None:
    noisy = [(float(x), float(x % 2)) for x in range(1000)]
    assert all(abs(y - 0.5) < 0.03 for _, y in smooth(noisy)[-10:])


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=120), st.floats(0.01, 0.9))
def test_smoothing_is_the_mean_of_each_window(values: list[int], share: float) -> None:
    half = max(1, round(len(values) * share / 2))
    windows = [values[i - min(half, i) : i + min(half, i) + 1] for i in range(len(values))]
    smoothed = smooth([(float(x), float(y)) for x, y in enumerate(values)], share)
    assert [y for _, y in smoothed] == [sum(window) / len(window) for window in windows]


def test_smoothing_adds_each_value_up_twice_however_long_the_window() -> None:
    class Counted(float):
        additions = 0

        def __add__(self, other: float) -> float:
            Counted.additions += 1
            return float(self) + other

        __radd__ = __add__

    smooth([(float(x), Counted(x)) for x in range(3_000)], share=0.5)
    assert 0 < Counted.additions <= 3 * 3_000  # every window added up: 3 million


def test_smoothing_passes_over_what_is_not_finite_and_forgets_a_spike() -> None:
    many = [(float(x), 2.0) for x in range(20_000)]
    many[3], many[4], many[5] = (3.0, 1e30), (4.0, math.nan), (5.0, math.inf)
    smoothed = smooth(many)
    assert smoothed[1_000:] == many[1_000:] and math.isfinite(smoothed[4][1])
    assert math.isnan(smooth([(0.0, math.nan), (1.0, math.nan)])[0][1])


@pytest.mark.parametrize("high", [1e308, 1.7e308])
def test_the_largest_floats_are_drawn(high: float) -> None:
    points = [(float(x), high if x % 2 else -high) for x in range(60)]
    root = parse(line_chart("loss", "step", "", [Series("a", points, faint=True), Series("a", smooth(points))]))
    drawn = [float(y) for line in root.findall(".//polyline") for y in line.get("points").replace(",", " ").split()]
    assert all(0 <= y <= WIDTH for y in drawn)
    assert "loss" in "\n".join(text_plot([Series("loss", [*points, (0.0, high)])], 80))


def test_a_line_spans_the_plot_and_a_higher_value_is_further_up() -> None:
    root = parse(line_chart("loss", "step", "nats", [Series("train", [(0, 4.0), (50, 2.0), (100, 1.0)])]))
    points = [tuple(map(float, p.split(","))) for p in root.find(".//polyline").get("points").split()]
    assert points[0][0] == LEFT and points[-1][0] == WIDTH - RIGHT
    assert points[0][1] < points[1][1] < points[2][1] < HEIGHT
    assert points[1][0] == pytest.approx((LEFT + WIDTH - RIGHT) / 2, abs=0.1)


def test_axes_are_labelled_legends_drawn_and_text_escaped() -> None:
    figure = line_chart(
        "a < b", "step", "loss & more", [Series("x<y", [(0, 1.0), (1, 2.0)]), Series("x<y", [(0, 1.0)], faint=True)]
    )
    root = parse(figure)
    texts = ["".join(e.itertext()) for e in root.iter()]
    assert {"a < b", "step", "loss & more", "x<y"} <= set(texts)
    assert len(root.findall(".//div/span")) == 1


def test_points_that_are_not_finite_are_left_out_and_nothing_is_drawn_without_points() -> None:
    assert line_chart("t", "x", "y", [Series("a", [(0, math.nan), (1, math.inf)])]) == ""
    assert line_chart("t", "x", "y", []) == ""
    root = parse(line_chart("t", "x", "y", [Series("a", [(0, math.nan), (1, 2.0)])]))
    assert root.find(".//circle") is not None


def test_intervals_are_drawn_to_scale() -> None:
    rows = [("math", {"SFT": Interval(0.5, 0.4, 0.6), "RL": Interval(1.0, 0.9, 1.0)})]
    root = parse(interval_chart("scores", "pass@1", rows, ["base", "SFT", "RL"], {"math": 0.0}))
    dots = [float(c.get("cx")) for c in root.iter("circle")]
    assert [c.get("fill") for c in root.iter("circle")] == ["var(--c1)", "var(--c2)"]
    whiskers = [e for e in root.iter("line") if e.get("class") == "whisker"]
    low, high = float(whiskers[0].get("x1")), float(whiskers[0].get("x2"))
    assert (low + high) / 2 == pytest.approx(dots[0], abs=0.1)
    baseline = next(float(e.get("x1")) for e in root.iter("line") if e.get("class") == "baseline")
    assert dots[1] == pytest.approx(WIDTH - RIGHT, abs=0.1)
    assert (dots[0] - baseline) / (dots[1] - baseline) == pytest.approx(0.5, abs=0.01)
    assert interval_chart("scores", "pass@1", [], ["SFT"], {}) == ""
