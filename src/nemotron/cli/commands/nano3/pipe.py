"""nemotron nano3 pipe: all stages, a table of what they reached, and the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.errors import DONE, FAILED, RunFailed, UserError, did_you_mean
from nemo_runspec.job import RecipeConfig, parse_env, parse_recipe_config, registry_of
from nemo_runspec.pipeline import Step, StepResult, run_pipeline, submit_pipeline, submit_to_slurm, with_overrides
from nemo_runspec.profile import executor_of
from nemo_runspec.variables import ARTIFACTS_ROOT
from nemotron.cli.recipe_dir import recipe_dir

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version

PRETRAIN, SFT, RL, EVAL = (
    recipe_dir(f"nano3/{stage}") for stage in ("stage0_pretrain", "stage1_sft", "stage2_rl", "stage3_eval")
)
# Whose model each stage makes, by the name that the evaluation gives to it.
STAGE_OF = {"base": "pretrain", "sft": "sft", "rl": "rl"}
# A stage and its first step; `--from sft` begins with the data of SFT.
STAGES = {"pretrain": "data-pretrain", "sft": "data-sft", "rl": "data-rl", "eval": "eval"}


def pipe(
    ctx: typer.Context,
    start: Annotated[str | None, typer.Option("--from", metavar="STAGE", hidden=True)] = None,
) -> None:
    """All of it: data, base model, SFT, RL, evaluation.

    A step whose config, script and inputs were run before is skipped. At the end stands a table of what each stage
    reached; outside a band the command exits with 1. Writes a report to output/nano3/report-CONFIG.html.

    \b
    Reads and writes the artifacts nano3-STAGE-data-CONFIG, nano3-STAGE-model-CONFIG, nano3-STAGE-results-CONFIG.
    Configs: those that every stage has; tiny is for a laptop CPU, offline.

    \b
    Options, anywhere on the line:
      -c, --config NAME  the config of every step
      --from STAGE       begin with a stage: pretrain, sft, rl, eval
      --run PROFILE      run under a profile of env.toml; on a cluster, all steps as one experiment
      --batch PROFILE    submit them and leave
      --dry-run          check all steps and print what would run
      --force            run what is published already, and nothing half-way
      --debug            show tracebacks
      STEP:key=value     set a key of one step: data-pretrain, pretrain, data-sft, sft, data-rl, rl, eval

    \b
    Examples:
      nemotron nano3 pipe -c tiny
      nemotron nano3 pipe -c tiny --from sft sft:optimizer.lr=1e-3
    """
    raise typer.Exit(_execute_pipe(parse_recipe_config(ctx), start))


def _execute_pipe(cfg: RecipeConfig, start: str | None) -> int:
    # 1. The steps, in order. Each has its own script and config; `-c tiny` is the tiny config of each.
    steps = [
        Step("data-pretrain", PRETRAIN / "data_prep.py"),
        Step("pretrain", PRETRAIN / "train.py"),
        Step("data-sft", SFT / "data_prep.py"),
        Step("sft", SFT / "train.py"),
        Step("data-rl", RL / "data_prep.py"),
        Step("rl", RL / "train.py"),
        Step("eval", EVAL / "evaluate.py"),
    ]
    steps = with_overrides(steps, cfg.overrides)
    if start is not None:
        if start not in STAGES:
            raise UserError(f"unknown stage '{start}'", did_you_mean(start, STAGES))
        steps = steps[[step.name for step in steps].index(STAGES[start]) :]
    # 2. Run them, here or there. All are validated before the first one starts; what is published already is skipped.
    if executor_of(cfg.profile) != "local":
        return submit_pipeline("nano3-pipe", steps, cfg, submit_to_slurm)
    results = run_pipeline(steps, cfg)
    if cfg.dry_run:
        return DONE
    last, registry = results[-1], registry_of(parse_env(cfg.profile))
    evaluation = _evaluation(last, registry)
    if evaluation is None:
        return last.exit_code
    # 3. What came of it. An evaluation outside its bands has published its numbers, and then failed.
    page = _write_report(evaluation, last, registry)
    _show_table(evaluation, results)
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
    return next((version for version in versions if "bands" in version.record["metrics"]), None)


def _published_by(run_dir: Path, registry: Registry) -> list[Version]:
    """What the job in `run_dir` published before it failed, from the record of the job."""
    import yaml

    job = yaml.safe_load((run_dir / "job.yaml").read_text(encoding="utf-8"))
    found = [registry.find_published(name, job["fingerprint"]) for name in job["outputs"]]
    return [version for version in found if version is not None]


def _write_report(evaluation: Version, last: StepResult, registry: Registry) -> Path:
    """Start the script that turns the records behind an evaluation into one HTML page; returns the page's path."""
    page = last.run_dir.parent.with_name(f"report-{last.run_dir.name.rpartition('-')[0]}.html")
    script = recipe_dir("tools") / "report.py"
    environment = {**os.environ, ARTIFACTS_ROOT: str(registry.root)}
    done = subprocess.run(
        [sys.executable, str(script), evaluation.ref, "--output", str(page)], env=environment, check=False
    )
    if done.returncode:
        raise RunFailed("the report was not written", f"try it alone: python {script} {evaluation.ref}")
    return page


def _show_table(evaluation: Version, results: list[StepResult]) -> None:
    """Print what each stage reached beside the band it is expected in, and the wall time of each step."""
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "quantity", "reached", "band", "", title="What each stage reached")
    for column in table.columns[2:4]:
        column.justify = "right"
    above = ""
    for band in evaluation.record["metrics"]["bands"]:
        model, _, quantity = band["name"].partition(".")
        if above and model != above:
            table.add_section()
        value = "not measured" if band["value"] is None else f"{band['value']:.3f}"
        mark = "ok" if band["passed"] else "[bold red]outside[/]"
        table.add_row(
            STAGE_OF.get(model, model) if model != above else "",
            quantity.replace("_", " "),
            value,
            f"{band['relation']} {band['bound']:g}",
            mark,
        )
        above = model
    walls = [f"{r.step.name} {'skipped' if r.status == 'skipped' else _minutes(r.seconds)}" for r in results]
    console = Console(highlight=False)
    console.print(table)
    console.print(f"wall time {_minutes(sum(r.seconds for r in results))}: {', '.join(walls)}")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
