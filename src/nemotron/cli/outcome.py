"""What a pipeline has reached: the table beside the bands, and the report, from the results of its evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.errors import DONE, FAILED, RunFailed, UserError
from nemo_runspec.pipeline import Step, StepResult
from nemo_runspec.variables import ARTIFACTS_ROOT
from nemo_runspec.words import shown
from nemotron.cli.recipe_dir import recipe_dir

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version


def check_report(steps: Sequence[Step], family: Path) -> None:
    """Read, before anything runs, the `report.yaml` that `show_outcome` needs where the last step is the evaluation.

    Raises:
        UserError: there is none, it is malformed, or a model in it has no stage; with file and line.
    """
    if steps[-1].name == "eval":
        _described_models(family)


def show_outcome(results: Sequence[StepResult], registry: Registry, family: Path) -> int:
    """Print what each stage reached and write the report, if the last step is the evaluation and published its numbers.

    An evaluation outside its bands has published its numbers, and then failed.

    Args:
        family: folder of the recipe, whose `report.yaml` names the models and the stages that make them.

    Returns:
        The exit code of the command: that of the last step, or 1 where a number is outside its band.

    Raises:
        RunFailed: the report could not be written.
    """
    last = results[-1]
    evaluation = _evaluation(last, registry)
    if evaluation is None:
        return last.exit_code
    _show_table(evaluation, results, family)
    page = _write_report(evaluation, last, registry, family)
    typer.echo(f"report: {page}")
    if evaluation.record["metrics"]["in_band"]:
        return last.exit_code
    if last.status == "skipped":  # otherwise the evaluation itself has just said so
        typer.echo("error: numbers are outside their bands (see the table)", err=True)
    return FAILED


def _evaluation(last: StepResult, registry: Registry) -> Version | None:
    """The results that the step `eval` published, also when they made it fail; None where there are none.

    They are known by what they hold, not by their name, which the config and `eval:run.results=NAME` may choose.
    """
    if last.step.name != "eval" or last.exit_code not in (DONE, FAILED):
        return None
    versions = last.versions.values() if last.exit_code == DONE else _published_by(last.run_dir, registry)
    return next((version for version in versions if "bands" in version.record.get("metrics", {})), None)


def _published_by(run_dir: Path, registry: Registry) -> list[Version]:
    """What the job in `run_dir` published before it failed, from the record of the job."""
    record = run_dir / "job.yaml"
    job = read_yaml(record.read_text(encoding="utf-8"), str(record))[0]
    versions = [registry.find_published(name, job["fingerprint"]) for name in job["outputs"]]
    return [version for version in versions if version is not None]


def _write_report(evaluation: Version, last: StepResult, registry: Registry, family: Path) -> Path:
    """Start the script that turns the records behind an evaluation into one HTML page; returns the page's path."""
    page = last.run_dir.parent.with_name(f"report-{last.run_dir.name.rpartition('-')[0]}.html")
    script = recipe_dir("tools") / "report.py"
    environment = {**os.environ, ARTIFACTS_ROOT: str(registry.root)}
    command = [sys.executable, str(script), evaluation.ref, "--output", str(page), "--family", str(family)]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise RunFailed("the report was not written", f"try it alone: python {script} {evaluation.ref}")
    return page


def _described_models(family: Path) -> dict[str, dict[str, str]]:
    """The models that a family's `report.yaml` describes, by role."""
    path = family / "report.yaml"
    try:
        about, lines = read_yaml(path.read_text(encoding="utf-8"), shown(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {shown(path)}, which says what the report shows: {error}") from None
    models = about.get("models") if isinstance(about, dict) else None
    if not isinstance(models, dict):
        raise UserError(f"{shown(path)}: models must be a group of keys", "as in sft: {name: SFT, stage: sft}")
    for role, model in models.items():
        if not isinstance(model, dict) or not {"name", "stage"} <= model.keys():
            raise UserError(f"{lines.get(('models', role), shown(path))}: models.{role} needs a name and a stage")
    return models


def _show_table(evaluation: Version, results: Sequence[StepResult], family: Path) -> None:
    """Print what each stage reached beside the band it is expected in, and the wall time of each step."""
    from rich.console import Console
    from rich.table import Table

    from nemotron.kit.metrics import format_seconds

    models = _described_models(family)
    table = Table("stage", "quantity", "reached", "band", "", title="What each stage reached")
    for column in table.columns[2:4]:
        column.justify = "right"
    above = ""
    metrics = evaluation.record["metrics"]
    for band in metrics["bands"]:
        model, _, quantity = band["name"].partition(".")
        if above and model != above:
            table.add_section()
        stage = models[model]["stage"] if model in models else model
        value = "not measured" if band["value"] is None else f"{band['value']:.3f}"
        expected = f"{band['relation']} {band['bound']:g}"
        mark = "ok" if band["passed"] else "[bold red]outside[/]"
        table.add_row(stage if model != above else "", quantity.replace("_", " "), value, expected, mark)
        above = model
    walls = [f"{r.step.name} {'skipped' if r.status == 'skipped' else format_seconds(r.seconds)}" for r in results]
    console = Console(highlight=False)
    console.print(table if table.rows else "no bands: the config of the evaluation states none")
    if not_run := metrics.get("not_run"):
        line = f"not run, as no sandbox started: {', '.join(not_run)}; means and bands are without it"
        console.print(line, soft_wrap=True)
    console.print(f"wall time {format_seconds(sum(r.seconds for r in results))}: {', '.join(walls)}", soft_wrap=True)
