"""Rows of the performance tables of Megatron-Bridge and NeMo-RL: half of them fit the planner, the others judge it.

throughput.csv: for each task, model, GPU and precision the row of the newest container from 26.04.01 on, for the models
whose blocks this package counts. rl_steps.csv: for each model, GPU, precision, lag and number of GPUs the row of the
newest version. Columns as on the page; `lag`: steps off policy; `generation_gpus`: by the recipe of that name there.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence

from nemotron.stack.planning.layout import Layout, with_parallel
from nemotron.stack.planning.references import REFERENCES
from nemotron.stack.planning.rl_step import RlStep
from nemotron.stack.planning.speed import HERE

Row = dict[str, str]
OLDEST_OF_TODAY = "26.06"  # from this container on, experts on Blackwell run in CUDA graphs


def rows(file: str) -> list[Row]:
    """All rows of a table."""
    with (HERE / file).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def halves(table: Sequence[Row], key: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Calibration and held-out half: sorted by the SHA-256 of what identifies a row; the first half calibrates."""
    ordered = sorted(table, key=lambda row: hashlib.sha256(" ".join(row[name] for name in key).encode()).hexdigest())
    middle = (len(ordered) + 1) // 2
    return ordered[:middle], ordered[middle:]


def throughput_halves() -> tuple[list[Row], list[Row]]:
    """Of throughput.csv."""
    return halves(rows("throughput.csv"), ("task", "model", "gpu", "precision", "gpus"))


def rl_halves() -> tuple[list[Row], list[Row]]:
    """Of rl_steps.csv."""
    return halves(rows("rl_steps.csv"), ("model", "gpu", "precision", "lag", "gpus"))


def layout_of(row: Row) -> Layout:
    """The layout of a row of throughput.csv."""
    layout = Layout(
        REFERENCES[row["model"]], int(row["gpus"]), int(row["seq"]), int(row["gbs"]), int(row["mbs"]),
        row["precision"].lower(), virtual=int(row["vp"]), fsdp=row["fsdp"] != "0",
    )  # fmt: skip
    return _parallel(layout, row)


def step_of(row: Row) -> RlStep:
    """The step of a row of rl_steps.csv."""
    gpus, generation, lag = int(row["gpus"]), int(row["generation_gpus"]), int(row["lag"])
    training = gpus if lag == 0 else gpus - generation
    layout = Layout(REFERENCES[row["model"]], training, int(row["seq"]), int(row["batch"]), 1, row["precision"].lower())
    return RlStep(
        _parallel(layout, row), int(row["batch"]), float(row["mean"]), lag, generation, int(row["generation_tp"])
    )


def is_host_bound(row: Row) -> bool | None:
    """Whether the CPU starts the experts' kernels: in containers of before; None: as the GPU of today."""
    return True if row["container"] < OLDEST_OF_TODAY else None


def _parallel(layout: Layout, row: Row) -> Layout:
    return with_parallel(
        layout,
        tensor_model_parallel_size=int(row["tp"]),
        pipeline_model_parallel_size=int(row["pp"]),
        context_parallel_size=int(row["cp"]),
        expert_model_parallel_size=int(row["ep"]),
        sequence_parallel=int(row["tp"]) > 1,
    )
