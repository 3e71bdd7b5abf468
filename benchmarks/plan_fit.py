#!/usr/bin/env python
"""Fits the coefficients of `nemotron plan` to half of the published rows, and judges them by the other half.

    python benchmarks/plan_fit.py            # the fit and its errors
    python benchmarks/plan_fit.py --table    # every row, predicted beside published, as in docs/guides/plan.md

The split follows from a hash of what identifies a row (`plan_rows.py`). Throughput is linear in its
coefficients: non-negative least squares of the relative error. A step of RL is not: least squares of the logarithm.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
from plan_rows import NOT_COUNTED, Row, layout_of, rl_halves, step_of, throughput_halves
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from nemotron.stack.planning.rl_step import (
    decoding_memory_seconds,
    decoding_steps,
    rl_parts,
    rl_seconds,
    training_seconds,
)
from nemotron.stack.planning.speed import coefficients, gpus, iteration_seconds, token_parts

HALVES = ("calibration", "held out")
RL_START = (1.5, 2.0, 1e-4, 10.0)  # where the search begins; a step of RL has these four coefficients


def fit_throughput(rows: Sequence[Row]) -> dict[str, float]:
    """Part -> coefficient."""
    table = []
    for row in rows:
        layout = layout_of(row)
        parts = token_parts(layout, gpus()[row["gpu"].lower()])
        scale = (1 + layout.bubble) * float(row["tokens_s_gpu"])
        table.append({part: seconds * scale for part, seconds in parts.items()})
    names = list(table[0])
    shares = np.array([[row[name] for name in names] for row in table])
    largest = shares.max(axis=0)
    found, _ = nnls(shares / largest, np.ones(len(rows)))
    return dict(zip(names, (found / largest).tolist(), strict=True))


def fit_rl(rows: Sequence[Row]) -> dict[str, float]:
    """Part of a step -> coefficient. Needs the coefficients of throughput as they are recorded."""
    raw = []
    for row in rows:
        step, gpu = step_of(row), gpus()[row["gpu"].lower()]
        launches = decoding_steps(step) * len(step.training.model.hybrid_override_pattern)
        raw.append((training_seconds(step, gpu), decoding_memory_seconds(step, gpu), launches))

    def errors(values: np.ndarray) -> list[float]:
        logs = []
        for row, (training, memory, launches) in zip(rows, raw, strict=True):
            generation = values[1] * memory + values[2] * launches
            parts = {"training": values[0] * training, "generation": generation, "all else": values[3]}
            logs.append(math.log(rl_seconds(parts, int(row["lag"])) / float(row["step_s"])))
        return logs

    starts = [np.array(RL_START) * factor for factor in (0.5, 1.0, 2.0)]
    best = min(
        (least_squares(errors, start, bounds=(0, np.inf), x_scale=start) for start in starts), key=lambda o: o.cost
    )
    return dict(zip(("training", "memory", "launch", "step"), best.x.tolist(), strict=True))


def throughput_errors(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Predicted tokens a second and GPU, with the recorded coefficients."""
    predicted = []
    for row in rows:
        layout = layout_of(row)
        seconds = iteration_seconds(layout, gpus()[row["gpu"].lower()])
        predicted.append((row, layout.tokens / seconds / layout.gpus))
    return predicted


def rl_errors(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Predicted seconds of a step."""
    steps = [(row, step_of(row), gpus()[row["gpu"].lower()]) for row in rows]
    return [(row, rl_seconds(rl_parts(step, gpu), step.lag)) for row, step, gpu in steps]


def summary(name: str, predicted: Sequence[tuple[Row, float]], column: str) -> str:
    """Mean, median and largest error of a half, and how many rows are within 15 %."""
    off = sorted(abs(value / float(row[column]) - 1) for row, value in predicted)
    within = sum(error <= 0.15 for error in off)
    return (
        f"{name}: {len(off)} rows, mean error {np.mean(off):.1%}, median {np.median(off):.1%}, largest {off[-1]:.0%}, "
        f"{within} within 15 %"
    )


def main() -> None:
    """Print the fit, the recorded coefficients' errors, and with --table all rows."""
    throughput, rl = throughput_halves(), rl_halves()
    print("training:", {part: float(f"{value:.3g}") for part, value in fit_throughput(throughput[0]).items()})
    print("recorded:", coefficients("training"))
    print("rl:      ", {part: float(f"{value:.3g}") for part, value in fit_rl(rl[0]).items()})
    print("recorded:", coefficients("rl"))
    for index, half in enumerate(HALVES):
        predicted = throughput_errors(throughput[index])
        counted = [(row, value) for row, value in predicted if row["model"] not in NOT_COUNTED]
        print(summary(f"throughput, {half}", predicted, "tokens_s_gpu"))
        print(summary(f"  without {', '.join(NOT_COUNTED)}", counted, "tokens_s_gpu"))
        print(summary(f"RL step, {half}", rl_errors(rl[index]), "step_s"))
    if "--table" in sys.argv:
        print("\n".join([*throughput_table(), "", *rl_table()]))


def throughput_table() -> list[str]:
    """Rows of the guide's table, a line each: tokens a second and GPU."""
    lines = []
    for half, table in zip(HALVES, throughput_halves(), strict=True):
        for row, value in throughput_errors(table):
            published = float(row["tokens_s_gpu"])
            layout = f"TP{row['tp']} PP{row['pp']} CP{row['cp']} EP{row['ep']}" + " FSDP" * (row["fsdp"] != "0")
            cells = (
                half, row["task"], row["model"], f"{row['gpus']} {row['gpu']}", row["precision"], layout,
                row["container"], f"{published:,.0f}", f"{value:,.0f}", f"{value / published - 1:+.0%}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def rl_table() -> list[str]:
    """The same of steps of GRPO: seconds."""
    lines = []
    for half, table in zip(HALVES, rl_halves(), strict=True):
        for row, value in rl_errors(table):
            published = float(row["step_s"])
            cells = (
                half, row["model"], f"{row['gpus']} {row['gpu']}", row["precision"], row["lag"], row["commit"],
                f"{published:g}", f"{value:.0f}", f"{value / published - 1:+.0%}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
