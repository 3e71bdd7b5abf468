"""nemotron super3 rl: without a phase, the published order of phases."""

from __future__ import annotations

import typer

from nemo_runspec.job import RecipeConfig, parse_recipe_config
from nemo_runspec.pipeline import (
    Step,
    first_failure,
    run_pipeline,
    submit_each_to_ray,
    submit_pipeline,
    submit_to_slurm,
    with_overrides,
)
from nemo_runspec.profile import executor_of
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.kit.steps import read_recipe

GROUP = "nemotron super3 rl "
PIPED = [step for step in read_recipe(recipe_dir("super3")).piped if step.command.startswith(GROUP)]
PHASES = tuple(Step(step.name, step.script, step.config_suffix, configs=step.configs) for step in PIPED)


def rl(ctx: typer.Context) -> None:
    """Align the model by reinforcement learning (stage 2).

    Without a phase: all of them, in the published order; a config of yours then has to exist for each of them, that
    of a blend as NAME-rlvr1 and so on.

    \b
    Examples:
      nemotron super3 rl -c tiny                 all phases, skipping those that are published
      nemotron super3 rl -c tiny rlhf:seed=7     STEP:key=value sets a key of one phase
      nemotron super3 rl rlvr -c tiny-rlvr1      one phase; its --help lists configs, artifacts and options
    """
    if ctx.invoked_subcommand is None:
        raise typer.Exit(_execute_published_order(parse_recipe_config(ctx)))


def _execute_published_order(cfg: RecipeConfig) -> int:
    # Three blends of verifiable rewards, SWE, a judge and RLHF with it, then the MTP block (steps.toml).
    phases = with_overrides(PHASES, cfg.overrides)
    executor = executor_of(cfg.profile)
    if executor == "ray":
        return submit_pipeline("super3-rl", phases, cfg, submit_each_to_ray, executor="ray")
    if executor != "local":
        return submit_pipeline("super3-rl", phases, cfg, submit_to_slurm)
    return first_failure(run_pipeline(phases, cfg))
