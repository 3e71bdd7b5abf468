"""The fit of `nemotron plan` against the published rows, half of which it has not seen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nemotron.stack.planning.speed import coefficients, gpus, iteration_seconds
from nemotron.stack.training.flops import training_flops_per_token

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """benchmarks/plan_fit.py."""
    pytest.importorskip("scipy")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield importlib.import_module("plan_fit")


@pytest.fixture(scope="module")
def published(benchmark: ModuleType) -> ModuleType:
    """benchmarks/plan_rows.py."""
    return importlib.import_module("plan_rows")


def test_our_flops_a_token_are_those_of_the_page(published: ModuleType) -> None:
    """Its TFLOP/s by its tokens/s. GPT OSS is left out: half of its attention has a window, and the page counts it in
    two ways."""
    for row in published.rows("plan_throughput.csv"):
        if row["model"] not in published.NOT_COUNTED:
            page = float(row["tflops"]) * 1e12 / float(row["tokens_s_gpu"])
            ours = training_flops_per_token(published.REFERENCES[row["model"]], int(row["seq"]))
            assert ours == pytest.approx(page, rel=0.09), row


@pytest.mark.parametrize(("halves", "least"), [("throughput_halves", 50), ("rl_halves", 20)])
def test_the_halves_share_no_row(published: ModuleType, halves: str, least: int) -> None:
    fitted, held_out = getattr(published, halves)()
    assert len(fitted) + len(held_out) >= least and 0 <= len(fitted) - len(held_out) <= 1
    assert not [row for row in fitted if row in held_out]
    assert all(row["commit"] and row["page"].endswith(".md") for row in (*fitted, *held_out))


def test_the_recorded_coefficients_are_the_fit(benchmark: ModuleType, published: ModuleType) -> None:
    """To three digits, so that nobody turns them by hand."""
    fit = benchmark.fit_throughput(published.throughput_halves()[0])
    assert fit == pytest.approx(coefficients("training"), rel=5e-3)
    assert benchmark.fit_rl(published.rl_halves()[0]) == pytest.approx(coefficients("rl"), rel=2e-2)


def test_errors_of_the_rows_that_were_held_out(benchmark: ModuleType, published: ModuleType) -> None:
    """As docs/guides/plan.md states them. A better fit may lower the bounds."""
    predicted = benchmark.throughput_errors(published.throughput_halves()[1])
    errors = {counted: list[float]() for counted in (True, False)}
    for row, value in predicted:
        error = abs(value / float(row["tokens_s_gpu"]) - 1)
        errors[row["model"] not in published.NOT_COUNTED].append(error)
    assert len(errors[True]) == 19 and max(errors[True]) < 0.15 and sum(errors[True]) / 19 < 0.06
    assert len(errors[False]) == 6 and sum(errors[True] + errors[False]) / 25 < 0.115
    predicted = benchmark.rl_errors(published.rl_halves()[1])
    off = sorted(abs(value / float(row["step_s"]) - 1) for row, value in predicted)
    assert sum(off) / len(off) < 0.21 and sum(error <= 0.15 for error in off) >= 5


def test_the_guide_shows_every_row(benchmark: ModuleType) -> None:
    guide = (REPOSITORY / "docs/guides/plan.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in (*benchmark.throughput_table(), *benchmark.rl_table()) if line not in guide] == []


def test_every_published_row_can_be_planned(published: ModuleType) -> None:
    for row in published.rows("plan_throughput.csv"):
        layout = published.layout_of(row)
        assert layout.data >= 1 and layout.micro_batches >= 1
        assert iteration_seconds(layout, gpus()[row["gpu"].lower()]) > 0
