"""What runs logged, as a plot in the terminal or as a page of charts: `nemotron runs plot RUN [RUN…] [--html FILE]`."""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.kit.metrics import numbers_in, read_metrics
from nemotron.kit.run import METRICS_FILE
from nemotron.kit.runs import headline
from nemotron.recipes.tools.options import run_tool, write_output
from nemotron.recipes.tools.svg import Series, clipped, line_chart, number, robust_range, smooth, ticks

MARKS = "*o+x#@"  # one a line; letters, so that they can be told apart without colours and in any encoding
HEIGHT = 18  # lines of the plot in the terminal
NOISY = 40  # points from which a chart shows the running mean


@dataclass(frozen=True)
class Options:
    """runs: name -> directory. metric: what to plot, or None. html: the page to write, or None."""

    runs: dict[str, str]
    metric: str | None
    html: str | None


Points = list[tuple[float, float]]


def read_curves(directory: Path) -> dict[str, Points]:
    """Metric -> points (step, value) of the run in `directory`, in the order of the log.

    Raises UserError where it has logged nothing yet.
    """
    curves = curves_of(read_metrics(directory / METRICS_FILE))
    if not curves:
        raise UserError(f"{directory} has logged no metrics", "training logs them; nemotron runs list shows who has")
    return curves


def curves_of(records: Sequence[dict[str, Any]]) -> dict[str, Points]:
    """Metric -> points (step, value) of the records of a log, in their order."""
    curves: dict[str, Points] = {}
    for line in records:
        values = numbers_in(line)
        step = values.pop("step")
        values.pop("time", None)
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def drawn(label: str, points: Points) -> list[Series]:
    """The lines of one curve: where it is noisy its running mean, and the points faintly behind it."""
    if len(points) > NOISY:
        return [Series(label, points, faint=True), Series(label, smooth(points))]
    return [Series(label, points)] if points else []


def chosen_metrics(curves: dict[str, dict[str, Points]], metric: str | None) -> list[str]:
    """The metrics of one plot: `metric`, its entries (`valid_loss.web`), or without it the first run's headline."""
    names = list(dict.fromkeys(name for of_run in curves.values() for name in of_run))
    if metric is None:
        first = next(iter(curves.values()))
        metric = headline({name: points[-1][1] for name, points in first.items()})
    chosen = [name for name in names if name == metric or name.startswith(f"{metric}.")]
    if not chosen:
        raise UserError(f"no metric {metric!r} was logged", did_you_mean(str(metric), names, "metrics"))
    for run, of_run in curves.items():
        if not of_run.keys() & set(chosen):
            logged = ", ".join(of_run)
            print(f"{run} is left out: it has logged no {metric}; choose with --metric: {logged}", file=sys.stderr)
    return chosen


def text_plot(series: Sequence[Series], width: int) -> list[str]:
    """Lines of text, at most `width` columns: axes, one mark a series, a legend. A column shows the mean of its points.

    Raises UserError when there is not a single finite point.
    """
    finite = [Series(s.label, [p for p in s.points if math.isfinite(p[1])]) for s in series]
    finite = [s for s in finite if s.points]
    if not finite:
        raise UserError("there is no finite number to plot")
    y_low, y_high = robust_range(finite)
    x_low, x_high = (pick(x for s in finite for x, _ in s.points) for pick in (min, max))
    levels = ticks(y_low, y_high)
    margin = max(len(number(level)) for level in levels)
    columns = max(10, width - margin - 3)

    def row_of(value: float) -> int:
        share = (min(max(value, y_low), y_high) - y_low) / (y_high - y_low)
        return round((1 - share) * (HEIGHT - 1))

    cells = [[" "] * columns for _ in range(HEIGHT)]
    for mark, s in zip(MARKS * len(finite), finite, strict=False):
        buckets: dict[int, list[float]] = {}
        for x, y in s.points:
            column = round((x - x_low) / (x_high - x_low or 1) * (columns - 1))
            buckets.setdefault(column, []).append(clipped(y))
        means = sorted((column, sum(values) / len(values)) for column, values in buckets.items())
        for (left, y_left), (right, y_right) in zip(means, [*means[1:], means[-1]], strict=True):
            for column in range(left, max(right, left + 1)):
                y = y_left + (y_right - y_left) * (column - left) / max(right - left, 1)
                cells[row_of(y)][column] = mark
    labels = {row_of(level): number(level) for level in levels}
    lines = [f"{labels.get(row, ''):>{margin}} | {''.join(line).rstrip()}".rstrip() for row, line in enumerate(cells)]
    lines.append(f"{'':>{margin}} +{'-' * columns}")
    begin, end = number(x_low), number(x_high)
    lines.append(f"{'':>{margin}}   {begin}{'step':^{max(4, columns - len(begin) - len(end))}}{end}")
    for mark, s in zip(MARKS * len(finite), finite, strict=False):
        lines.append(f"{'':>{margin}}   {mark} {s.label}: {s.points[-1][1]:.4g} at step {s.points[-1][0]:.0f}")
    return lines


def charts(curves: dict[str, dict[str, Points]], metrics: Sequence[str]) -> str:
    """The page: one chart a metric, one colour a run."""
    figures = []
    for metric in metrics:
        series = [line for run, of_run in curves.items() for line in drawn(run, of_run.get(metric, []))]
        figures.append(line_chart(metric, "step", "", series))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("runs.html.jinja").render(runs=list(curves), figures=[f for f in figures if f])


def main(options: Options) -> None:
    """Print the plot, or write the page."""
    curves = {name: read_curves(Path(directory)) for name, directory in options.runs.items()}
    if options.html is not None:
        names = list(dict.fromkeys(name for of_run in curves.values() for name in of_run))
        page = Path(options.html)
        text = charts(curves, names if options.metric is None else chosen_metrics(curves, options.metric))
        write_output(page, text, "--html")
        print(page)
        return
    metrics = chosen_metrics(curves, options.metric)
    series = [
        Series(f"{run} {metric}" if len(curves) > 1 else metric, of_run[metric])
        for metric in metrics
        for run, of_run in curves.items()
        if metric in of_run
    ]
    print("\n".join(text_plot(series, shutil.get_terminal_size().columns)))


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
