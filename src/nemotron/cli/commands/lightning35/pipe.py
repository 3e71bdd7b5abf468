"""nemotron lightning35 pipe: all stages, a table of what they reached, and the report."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec import pipeline
from nemo_runspec.errors import DONE
from nemo_runspec.job import RecipeConfig, parse_env, parse_recipe_config, registry_of
from nemo_runspec.profile import executor_of
from nemotron.cli.commands.lightning35.run_step import RECIPE
from nemotron.cli.outcome import check_report, show_outcome

# In order. Each has its own script and config; `-c tiny` is the tiny config of each.
STEPS = tuple(pipeline.Step(step.name, step.script, step.config_suffix, configs=step.configs) for step in RECIPE.piped)

HELP = f"""All of it: data, base model, SFT, RL, quantisation, evaluation.

A step whose config, script and inputs were run before is skipped. Ends with a table of what each stage reached and a
report. Options are those of nemotron super3 pipe: its --help has them.

\b
Steps: {", ".join(step.name for step in RECIPE.piped)}

\b
Example: nemotron lightning35 pipe -c smoke
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
    steps = pipeline.part_of(pipeline.with_overrides(STEPS, cfg.overrides), RECIPE.part(start, end))
    check_report(steps, RECIPE.folder)
    # 2. Run them, here or there. All are validated before the first one starts; what is published already is skipped.
    executor = executor_of(cfg.profile)
    if executor == "ray":
        return pipeline.submit_pipeline("lightning35-pipe", steps, cfg, pipeline.submit_each_to_ray, executor="ray")
    if executor != "local":
        return pipeline.submit_pipeline("lightning35-pipe", steps, cfg, pipeline.submit_to_slurm)
    results = pipeline.run_pipeline(steps, cfg)
    if cfg.dry_run:
        return DONE
    # 3. What came of it.
    return show_outcome(results, registry_of(parse_env(cfg.profile)), RECIPE.folder)
