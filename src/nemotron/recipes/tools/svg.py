"""Line charts and interval plots as inline SVG text, for pages. Colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 44
Point = tuple[float, float]
MOST = 1e300
COLOURS = 6  # --c0 to --c5 in the style sheet of the page


@dataclass(frozen=True)
class Series:
    """One line of a chart through the `points` (x, y). Lines of one label share its colour."""

    label: str
    points: Sequence[tuple[float, float]]
    faint: bool = False
    dashed: bool = False


def ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], about `target` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """A value for an axis: 1200000 -> 1.2M, 0.25 -> 0.25."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{suffix}"
    return f"{value:.6g}"  # 1.00005 is not 1, and step 12345 is not 12.3k


def smooth(points: Sequence[tuple[float, float]], share: float = 0.04) -> list[tuple[float, float]]:
    """Centred running mean over `share` of the points, of the finite ones; NaN where there is none.

    At the start, where a loss is steep, the window shrinks on both sides; at the end, where it is flat, on one.
    """
    half = max(1, round(len(points) * share / 2))
    finite = [math.isfinite(y) for _, y in points]
    sums = _window_sums([clipped(y) if ok else 0.0 for (_, y), ok in zip(points, finite, strict=True)], half)
    counts = _window_sums(finite, half)
    return [(x, total / n if n else math.nan) for (x, _), total, n in zip(points, sums, counts, strict=True)]


def _window_sums(values: Sequence[float], half: int) -> list[float]:
    """The sum over the window of `smooth` around each value, in linear time.

    Over blocks as long as a window, sums from the begin and to the end: a window lies in two of them at most. Nothing
    is subtracted, so that a spike of 1e30 leaves no rounding behind in the windows after it.
    """
    size = 2 * half + 1
    blocks = [values[i : i + size] for i in range(0, len(values), size)]
    from_begin = [total for block in blocks for total in accumulate(block)]
    to_end = [total for block in blocks for total in reversed([*accumulate(reversed(block))])]
    sums = []
    for i in range(len(values)):
        reach = min(half, i)
        first, last = i - reach, min(i + reach, len(values) - 1)
        if first % size == 0:
            sums.append(from_begin[last])
        elif first // size == last // size:  # the last value is the end of its block
            sums.append(to_end[first])
        else:
            sums.append(to_end[first] + from_begin[last])
    return sums


def clipped(y: float) -> float:
    """A value as it is drawn: differences and sums of such do not overflow."""
    return min(max(y, -MOST), MOST)


def robust_range(series: Sequence[Series]) -> tuple[float, float]:
    """Range of all y values that leaves out the first spike of a loss curve: the highest 1 % are clipped."""
    values = sorted(clipped(y) for line in series for _, y in line.points)
    low, high = values[0], values[min(len(values) - 1, math.ceil(len(values) * 0.99))]
    if high - low <= 1e-5 * abs(high):  # rounding: a level line
        pad = abs(high) * 0.05 or 1.0
    else:
        pad = (high - low) * 0.06
    return max(low - pad, 0.0) if low >= 0 else low - pad, high + pad


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> Markup:
    """An SVG figure with axes, grid, labels and a legend. Returns "" when there is not a single finite point."""
    series = [
        Series(s.label, [p for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])], s.faint, s.dashed)
        for s in series
    ]
    series = [s for s in series if s.points]
    if not series:
        return Markup("")
    x_low = min(x for s in series for x, _ in s.points)
    x_high = max(x for s in series for x, _ in s.points)
    x_high = x_high if x_high > x_low else x_low + 1
    y_low, y_high = robust_range(series)

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        y = min(max(y, y_low), y_high)
        return TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ticks(y_low, y_high):
        parts.append(_line("grid", (LEFT, py(value)), (WIDTH - RIGHT, py(value))))
        parts.append(_text("tick", (LEFT - 8, py(value) + 4), number(value), "end"))
    for value in ticks(x_low, x_high, 6):
        parts.append(_text("tick", (px(value), HEIGHT - BOTTOM + 18), number(value)))
    parts.append(_line("axis", (LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)))
    parts.append(_text("label", ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8), x_label))
    parts.append(_text("label", (-(TOP + HEIGHT - BOTTOM) / 2, 14), y_label, turned=True))
    colours = {label: i % COLOURS for i, label in enumerate(dict.fromkeys(s.label for s in series))}
    for s in series:
        colour = f"var(--c{colours[s.label]})"
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in _thin(s.points))
        style = "faint" if s.faint else "dashed" if s.dashed else "line"
        parts.append(f'<polyline class="{style}" stroke="{colour}" points="{path}"/>')
        if len(s.points) == 1:
            (x, y), *_ = s.points
            parts.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3.5" fill="{colour}"/>')
    return _figure(title, HEIGHT, parts, [(label, f"var(--c{i})") for label, i in colours.items()])


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most about 800 points, the last one kept: a page, not a data file."""
    stride = max(1, len(points) // 800)
    return [*points[:-1:stride], points[-1]]


@dataclass(frozen=True)
class Interval:
    """A score with its 95 % interval, all in [0, 1]."""

    value: float
    low: float
    high: float


def interval_chart(
    title: str,
    x_label: str,
    rows: Sequence[tuple[str, dict[str, Interval]]],
    labels: Sequence[str],
    baseline: dict[str, float],
) -> Markup:
    """Dots with whiskers on an axis from 0 to 1: one band a row (a task family), one colour a label (a model).

    Args:
        labels: all models in order, so that one keeps its colour in every chart.
        baseline: the best constant answer of a row, drawn as a grey mark.

    Returns "" when no row has a score.
    """
    shown = [label for label in labels if any(label in values for _, values in rows)]
    if not shown:
        return Markup("")
    left, band = 150, 14 * len(shown) + 14
    height = TOP + band * len(rows) + BOTTOM

    def px(x: float) -> float:
        return left + x * (WIDTH - left - RIGHT)

    parts = []
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(_line("grid", (px(value), TOP), (px(value), height - BOTTOM)))
        parts.append(_text("tick", (px(value), height - BOTTOM + 18), f"{value:.1f}"))
    for row, (name, values) in enumerate(rows):
        top = TOP + band * row
        parts.append(_text("rowname", (left - 12, top + band / 2 + 4), name, "end"))
        if name in baseline:
            parts.append(_line("baseline", (px(baseline[name]), top + 5), (px(baseline[name]), top + band - 5)))
        for i, label in enumerate(shown):
            if label in values:
                score, y, colour = values[label], top + 14 + 14 * i, f"var(--c{labels.index(label) % COLOURS})"
                parts.append(_line("whisker", (px(score.low), y), (px(score.high), y), colour))
                parts.append(f'<circle cx="{px(score.value):.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
    parts.append(_text("label", ((left + WIDTH - RIGHT) / 2, height - 8), x_label))
    legend = [(label, f"var(--c{labels.index(label) % COLOURS})") for label in shown]
    return _figure(title, height, parts, legend + ([("best constant answer", "var(--muted)")] if baseline else []))


def _line(kind: str, start: Point, end: Point, colour: str | None = None) -> str:
    (x1, y1), (x2, y2) = start, end
    stroke = f' stroke="{colour}"' if colour else ""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{stroke}/>'


def _text(kind: str, at: Point, text: str, anchor: str = "middle", turned: bool = False) -> str:
    x, y = at
    turn = ' transform="rotate(-90)"' if turned else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _figure(title: str, height: float, parts: Sequence[str], legend: Sequence[tuple[str, str]]) -> Markup:
    entries = "".join(f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for label, colour in legend)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return Markup(f'<figure><figcaption>{escape(title)}</figcaption>{svg}<div class="legend">{entries}</div></figure>')
