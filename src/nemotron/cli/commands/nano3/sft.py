"""nemotron nano3 sft: stage 1, supervised fine-tuning."""

from __future__ import annotations

import typer

from nemo_runspec.execution.local import execute_local
from nemo_runspec.job import (
    RecipeConfig,
    build_env_vars,
    build_job_config,
    display_job,
    parse_config,
    parse_env,
    parse_recipe_config,
    parse_runspec,
    save_configs,
)
from nemotron.cli.recipe_dir import recipe_dir

STAGE = recipe_dir("nano3/stage1_sft")


def sft(ctx: typer.Context) -> None:
    """Fine-tune the base model on conversations (stage 1)."""
    raise typer.Exit(_execute_sft(parse_recipe_config(ctx)))


def _execute_sft(cfg: RecipeConfig) -> int:
    # 1. Config: YAML + overrides, validated against the schema of the script that it names.
    train_config = parse_config(cfg, STAGE / "config", default="default")
    spec = parse_runspec(STAGE / train_config.run.script)
    env = parse_env(cfg.profile)  # env.toml; local when no profile
    job_config = build_job_config(train_config, spec, env, argv=cfg.argv)
    # 2. Show. A dry run ends here, after the same checks as a real one.
    display_job(job_config, spec, env)
    if cfg.dry_run:
        return 0
    job_dir = save_configs(job_config, spec)  # job.yaml, train.yaml
    env_vars = build_env_vars(job_config, env)  # secrets by name
    # 3. Here: a subprocess, torchrun if the script asks for it.
    return execute_local(spec, job_dir, env_vars)
    # 4. There: a cluster executor is chosen, packaged for and submitted to at this place. This release has none,
    #    so step 1 has refused every profile but a local one.
