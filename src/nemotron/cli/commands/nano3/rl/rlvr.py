"""nemotron nano3 rl rlvr: stage 2, reinforcement learning with verifiable rewards."""

from __future__ import annotations

import typer

from nemo_runspec.bundle import create_bundle
from nemo_runspec.display import display_job
from nemo_runspec.execution.local import execute_local
from nemo_runspec.execution.slurm import submit as slurm
from nemo_runspec.execution.slurm.follow import follow
from nemo_runspec.job import (
    RecipeConfig,
    build_env_vars,
    build_job_config,
    parse_config,
    parse_env,
    parse_recipe_config,
    parse_runspec,
    save_configs,
)
from nemotron.cli.recipe_dir import recipe_dir

STAGE = recipe_dir("nano3/stage2_rl")


def rlvr(ctx: typer.Context) -> None:
    """GRPO with verifiable rewards on all environments at once (stage 2)."""
    raise typer.Exit(_execute_rlvr(parse_recipe_config(ctx)))


def _execute_rlvr(cfg: RecipeConfig) -> int:
    # 1. Config: YAML + overrides, validated against the schema of the script that it names.
    spec = parse_runspec(STAGE / "rlvr.py")
    train_config = parse_config(cfg, spec)
    spec = parse_runspec(STAGE / train_config.run.script)  # another script, if the config names one
    env = parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=train_config)  # env.toml; local without a profile
    job_config = build_job_config(train_config, spec, env, argv=cfg.argv)
    # 2. Show. A dry run goes through the same checks as a real one.
    display_job(job_config, spec, env)
    # 3. Here: a subprocess, torchrun if there are several GPUs.
    if env.executor == "local":
        if cfg.dry_run:
            return 0
        job_dir = save_configs(job_config, spec)  # job.yaml, train.yaml
        return execute_local(spec, job_dir, build_env_vars(job_config, env))  # secrets by name
    # 4. There: the code as it is, the configs and launch.sh travel. NeMo-Run submits to Slurm, here or over SSH.
    name = job_config.run.name
    run = slurm.load_nemo_run(env)
    with (
        create_bundle(job_config, spec, env) as bundle,
        run.Experiment(name, **slurm.experiment_options(env, dry_run=cfg.dry_run)) as experiment,
        slurm.submitting(experiment),
    ):
        print(bundle.summary())
        executor = slurm.create_executor(env, bundle.folder, name)
        experiment.add(run.Script(path="launch.sh", entrypoint="bash"), executor=executor, name=name)
        if cfg.dry_run:
            print(slurm.submission_text(experiment, env))
            return 0
        experiment.run(detach=True)
    jobs = slurm.submitted_jobs(experiment, env)
    if cfg.attached:
        return follow(jobs)  # a failed job is a failed command
    print(slurm.how_to_follow(jobs))
    return 0
