"""nemotron nano3 rl: without a phase, the published order of phases."""

from __future__ import annotations

from contextlib import ExitStack

import typer

from nemo_runspec.bundle import create_bundle, published_dir
from nemo_runspec.env import executor_of
from nemo_runspec.errors import DONE, UserError
from nemo_runspec.execution.slurm import submit as slurm
from nemo_runspec.execution.slurm.follow import follow
from nemo_runspec.job import RecipeConfig, display_job, job_name, parse_recipe_config
from nemo_runspec.pipeline import Step, plan_pipeline, run_pipeline
from nemo_runspec.variables import PUBLISHED_DIR
from nemotron.cli.recipe_dir import recipe_dir

STAGE = recipe_dir("nano3/stage2_rl")


def rl(ctx: typer.Context) -> None:
    """Align the model by reinforcement learning (stage 2).

    Without a phase: all of them, in the published order.

    \b
    Examples:
      nemotron nano3 rl -c tiny         all phases, skipping those that are published
      nemotron nano3 rl rlvr -c tiny    one phase; its --help lists configs, artifacts and options
    """
    if ctx.invoked_subcommand is None:
        raise typer.Exit(_execute_published_order(parse_recipe_config(ctx)))


def _execute_published_order(cfg: RecipeConfig) -> int:
    # Nano 3 was aligned with verifiable rewards first; the phases stand here in the order in which they run.
    phases = [Step("rlvr", STAGE, STAGE / "config", overrides=cfg.overrides)]
    if executor_of(cfg.profile) != "local":
        return _submit(phases, cfg)
    results = run_pipeline(phases, cfg)
    return next((result.exit_code for result in results if result.exit_code), DONE)


def _submit(steps: list[Step], cfg: RecipeConfig) -> int:
    """Submit all steps as one experiment of NeMo-Run: each starts when the one before it has succeeded."""
    plan = plan_pipeline(steps, cfg)
    env = plan[0].job.env
    if env.slurm is None:
        raise UserError(
            f"profile {env.profile}: executor {env.executor} runs one step at a time", "a pipeline needs executor slurm"
        )
    name, published = job_name(f"nano3-rl-{plan[0].job.resolved.loaded.name}"), published_dir(env)
    if not env.registry_is_reachable:
        typer.echo("what is published already cannot be seen from here: every step runs")
    run = slurm.load_nemo_run(env)
    with (
        ExitStack() as bundles,
        run.Experiment(name, **slurm.experiment_options(env, dry_run=cfg.dry_run)) as experiment,
        slurm.submitting(experiment),
    ):
        before: list[str] = []
        for number, planned in enumerate(plan, start=1):
            spec, job = planned.job.resolved.spec, planned.job
            state = f": {planned.skipped}" if planned.versions else ""
            typer.echo(f"[{number}/{len(plan)}] {planned.step.name}{state}")
            if planned.versions:
                continue
            display_job(job, spec, job.env, show_config=cfg.dry_run)
            # What the steps before this one publish is found in `published`: the very versions, not the latest.
            bundle = create_bundle(job, spec, job.env, {PUBLISHED_DIR: published})
            folder = bundles.enter_context(bundle.written())
            executor = slurm.create_executor(job.env, folder, job.run.name)
            script = run.Script(path="launch.sh", entrypoint="bash")
            before = [experiment.add(script, executor=executor, name=job.run.name, dependencies=before)]
        if not before:
            return DONE
        typer.echo(bundle.summary())
        if cfg.dry_run:
            typer.echo(slurm.submission_text(experiment, env))
            return DONE
        experiment.run(detach=True)
    jobs = slurm.submitted_jobs(experiment, env)
    if cfg.attached:
        return follow(jobs)
    typer.echo(slurm.how_to_follow(jobs))
    return DONE
