"""nemotron nano2 pipe: all stages."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.job import RecipeConfig, parse_recipe_config
from nemo_runspec.pipeline import (
    Step,
    first_failure,
    part_of,
    run_pipeline,
    submit_each_to_ray,
    submit_pipeline,
    submit_to_slurm,
    with_overrides,
)
from nemo_runspec.profile import executor_of
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.kit.steps import read_recipe

RECIPE = read_recipe(recipe_dir("nano2"))
# In order. Each has its own script and config; `-c tiny` is the tiny config of each.
STEPS = tuple(Step(step.name, step.script, step.config_suffix, configs=step.configs) for step in RECIPE.piped)

HELP = f"""All of it: each stage's data, training and evaluation.

What `python -m nemotron.recipes.nano2 --scale tiny` does, in a process a step. A step whose config, script and inputs
were run before is skipped.

\b
Steps: {", ".join(step.name for step in RECIPE.piped)}

\b
Options, anywhere on the line:
  -c, --config NAME  the config of every step; tiny if none is given
  --from STEP        begin with the stage of a step: --from sft begins with the data of SFT
  --to STEP          end with a step
  --run PROFILE      run under a profile of env.toml; on a cluster, all steps as one experiment
  --batch PROFILE    submit them and leave
  --dry-run          check all steps and print what would run
  --force            run what is published already
  --debug            show tracebacks
  STEP:key=value     set a key of one step

\b
Examples:
  nemotron nano2 pipe -c tiny
  nemotron nano2 pipe -c tiny --from sft sft:lr=2e-3
"""


def pipe(
    ctx: typer.Context,
    start: Annotated[str | None, typer.Option("--from", metavar="STEP", hidden=True)] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="STEP", hidden=True)] = None,
) -> None:
    """All stages, each with its data, training and evaluation."""
    raise typer.Exit(_execute_pipe(parse_recipe_config(ctx), start, end))


def _execute_pipe(cfg: RecipeConfig, start: str | None, end: str | None) -> int:
    # 1. The steps, with what the command line says to each.
    steps = part_of(with_overrides(STEPS, cfg.overrides), RECIPE.part(start, end))
    # 2. Run them, here or there. All are validated before the first one starts; what is published already is skipped.
    executor = executor_of(cfg.profile)
    if executor == "ray":
        return submit_pipeline("nano2-pipe", steps, cfg, submit_each_to_ray, executor="ray")
    if executor != "local":
        return submit_pipeline("nano2-pipe", steps, cfg, submit_to_slurm)
    return first_failure(run_pipeline(steps, cfg))
