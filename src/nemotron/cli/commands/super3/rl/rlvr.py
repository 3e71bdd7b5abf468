"""nemotron super3 rl rlvr: stage 2, verifiable rewards, a config a blend of environments."""

from __future__ import annotations

import typer

from nemo_runspec import job
from nemo_runspec.bundle import create_bundle
from nemo_runspec.display import display_job
from nemo_runspec.execution import slurm
from nemo_runspec.execution.local import execute_local
from nemo_runspec.pipeline import submit_to_ray
from nemotron.cli.recipe_dir import recipe_dir

STAGE = recipe_dir("nano3/stage2_rl")  # the script is that of nano3
CONFIGS = recipe_dir("super3/stage2_rl/config")


def rlvr(ctx: typer.Context) -> None:
    """GRPO with verifiable rewards: three blends, then the two phases of SWE (stage 2)."""
    raise typer.Exit(_execute_rlvr(job.parse_recipe_config(ctx)))


def _execute_rlvr(cfg: job.RecipeConfig) -> int:
    # 1. Config: YAML + overrides, validated against the schema of the script that it names.
    spec = job.parse_runspec(STAGE / "rlvr.py", CONFIGS)
    train_config = job.parse_config(cfg, spec)
    spec = job.parse_runspec(job.find_script(CONFIGS, train_config.run.script))  # the one that the config names
    env = job.parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=train_config)  # env.toml, else local
    job_config = job.build_job_config(train_config, spec, env, dry_run=cfg.dry_run, argv=cfg.argv)
    # 2. Show. A dry run goes through the same checks as a real one.
    display_job(job_config, spec, env)
    # 3. Here: a subprocess, torchrun if there are several GPUs.
    if env.executor == "local":
        if cfg.dry_run:
            return 0
        job_dir = job.save_configs(job_config, spec)  # job.yaml, train.yaml
        return execute_local(spec, job_dir, job.build_env_vars(job_config, env))  # secrets by name
    # 4. There: the code as it is, the configs and launch.sh travel. Ray's own client hands them to a Ray cluster ...
    name = job_config.run.name
    with create_bundle(job_config, spec, env) as bundle:
        print(bundle.summary())
        if env.executor == "ray":
            return submit_to_ray(bundle, cfg)
        # ... and NeMo-Run to Slurm, here or over SSH.
        if cfg.dry_run and not slurm.nemo_run_is_installed():
            print(slurm.preview_text(name, {name: bundle.folder}, env))
            return 0
        run = slurm.load_nemo_run(env)
        with slurm.open_experiment(name, env, dry_run=cfg.dry_run) as experiment:
            executor = slurm.create_executor(env, bundle.folder, name)
            experiment.add(run.Script(path="launch.sh", entrypoint="bash"), executor=executor, name=name)
            if cfg.dry_run:
                print(slurm.submission_text(experiment, env))
                return 0
            experiment.run(detach=True)
    return slurm.follow_or_leave(experiment, env, attached=cfg.attached)  # a failed job is a failed command
