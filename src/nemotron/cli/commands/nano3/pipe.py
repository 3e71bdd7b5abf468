"""nemotron nano3 pipe: all stages, a table of what they reached, and the report."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.errors import DONE
from nemo_runspec.job import RecipeConfig, parse_env, parse_recipe_config, registry_of
from nemo_runspec.pipeline import (
    Step,
    part_of,
    run_pipeline,
    submit_each_to_ray,
    submit_pipeline,
    submit_to_slurm,
    with_overrides,
)
from nemo_runspec.profile import executor_of
from nemotron.cli.outcome import check_report, show_outcome
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.kit.steps import read_recipe

FAMILY = recipe_dir("nano3")
RECIPE = read_recipe(FAMILY)
# In order. Each has its own script and config; `-c tiny` is the tiny config of each.
STEPS = tuple(Step(step.name, step.script, step.config_suffix, configs=step.configs) for step in RECIPE.piped)

HELP = f"""All of it: data, base model, SFT, RL, evaluation.

A step whose config, script and inputs were run before is skipped. At the end stands a table of what each stage
reached; outside a band the command exits with 1. Writes a report to output/nano3/report-CONFIG.html.

\b
Reads and writes the artifacts nano3-STAGE-data-CONFIG, nano3-STAGE-model-CONFIG, nano3-STAGE-results-CONFIG.
Configs: those that every step has; tiny is for a laptop CPU, offline; smoke trains next to nothing, in a minute.

\b
Steps: {", ".join(step.name for step in RECIPE.piped)}

\b
Options, anywhere on the line:
  -c, --config NAME  the config of every step; no default yet: name one
  --from STEP        begin with the stage of a step: --from sft begins with the data of SFT
  --to STEP          end with a step: --to sft leaves out RL and evaluation, and so the table and the report
  --run PROFILE      run under a profile of env.toml; on a cluster, all steps as one experiment
  --batch PROFILE    submit them and leave
  --dry-run          check all steps and print what would run
  --force            run what is published already, and nothing half-way
  --debug            show tracebacks
  STEP:key=value     set a key of one step

\b
Examples:
  nemotron nano3 pipe -c tiny
  nemotron nano3 pipe -c tiny --from sft sft:optimizer.lr=1e-3
"""


def pipe(
    ctx: typer.Context,
    start: Annotated[str | None, typer.Option("--from", metavar="STEP", hidden=True)] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="STEP", hidden=True)] = None,
) -> None:
    """All stages, a table of what they reached, and the report."""
    raise typer.Exit(_execute_pipe(parse_recipe_config(ctx), start, end))


def _execute_pipe(cfg: RecipeConfig, start: str | None, end: str | None) -> int:
    # 1. The steps, with what the command line says to each.
    steps = part_of(with_overrides(STEPS, cfg.overrides), RECIPE.part(start, end))
    check_report(steps, FAMILY)
    # 2. Run them, here or there. All are validated before the first one starts; what is published already is skipped.
    executor = executor_of(cfg.profile)
    if executor == "ray":
        return submit_pipeline("nano3-pipe", steps, cfg, submit_each_to_ray, executor="ray")
    if executor != "local":
        return submit_pipeline("nano3-pipe", steps, cfg, submit_to_slurm)
    results = run_pipeline(steps, cfg)
    if cfg.dry_run:
        return DONE
    # 3. What came of it.
    return show_outcome(results, registry_of(parse_env(cfg.profile)), FAMILY)
