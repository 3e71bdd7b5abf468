"""The steps of a recipe, one after another: planned, run on this machine, or submitted together to a cluster.

Every step is validated before the first one starts, so that a misspelt key of the last step costs nothing. A step whose
fingerprint is already published is skipped, and the run stops at the first step that fails. A later step reads exactly
the versions that the earlier ones made or were skipped for, not whatever is the latest by then.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_runspec.bundle import Bundle, create_bundle, published_dir
from nemo_runspec.changes import changes_since, in_short
from nemo_runspec.config import list_configs
from nemo_runspec.display import display_job
from nemo_runspec.env.keys import EXECUTORS
from nemo_runspec.errors import DONE, INTERRUPTED, PREEMPTED, REFUSED, RunFailed, UserError, did_you_mean
from nemo_runspec.execution import slurm
from nemo_runspec.execution.local import execute_local
from nemo_runspec.execution.ray import jobs as ray
from nemo_runspec.execution.ray.following import follow as follow_ray_job
from nemo_runspec.installation import install_line
from nemo_runspec.job import (
    Job,
    RecipeConfig,
    build_env_vars,
    build_job_config,
    check_registry,
    find_script,
    job_name,
    parse_config,
    parse_env,
    parse_runspec,
    registry_of,
    save_configs,
)
from nemo_runspec.profile import executor_of
from nemo_runspec.variables import OUTPUT_ROOT, PUBLISHED_DIR

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version

READ_BYTES = 10 * 10**9  # of a version that a pipe reads again before it skips a step: some seconds to a minute
Status = Literal["done", "skipped", "failed"]


@dataclass(frozen=True)
class Step:
    """One step: a script, whose block says where its configs are. A config may name another script (`find_script`).

    `overrides` are this step's. It takes the config that the command line chose, with `config_suffix` behind its name.
    `configs`: the folder of its configs, where the script is that of another recipe.
    """

    name: str
    script: Path
    config_suffix: str = ""
    overrides: tuple[str, ...] = ()
    configs: Path | None = None


@dataclass(frozen=True)
class PlannedStep:
    """A step and its job. `versions`: what a run of the same fingerprint has published; empty where it is to run.

    `damage`: what is wrong with what was published, where that is why it is to run. `forced`: by `--force`.
    """

    step: Step
    job: Job
    versions: dict[str, Version] = field(default_factory=dict)
    damage: str = ""
    forced: bool = False

    @property
    def skipped(self) -> str:
        """What to say of a step that is not run."""
        made = ", ".join(version.ref for version in self.versions.values())
        return f"skipped, published already: {made}, fingerprint {self.job.run.fingerprint} (--force runs it again)"

    @property
    def state(self) -> str:
        """What stands after the step's name: skipped and why, or runs again and why, or nothing."""
        if self.versions:
            return f": {self.skipped}"
        reason = self.damage or ("" if self.forced else _changes(self.job))
        return f": runs again, {reason}" if reason else ""


@dataclass(frozen=True)
class StepResult:
    """How a step went. `seconds`: its wall time, 0 if skipped; `versions`: what it published, by name.

    exit_code: that of the script; 130 or 143 of a step that is done where a signal stopped the steps after it.
    """

    step: Step
    status: Status
    exit_code: int
    seconds: float
    run_dir: Path
    versions: dict[str, Version] = field(default_factory=dict)


# Submits the jobs of bundles under a common name, each to start when the one before it has succeeded, and, where the
# command line says `--run`, follows them; `--dry-run` only shows what would be submitted. Returns the exit code.
Submit = Callable[[str, Sequence[Bundle], RecipeConfig], int]


def with_overrides(steps: Iterable[Step], overrides: Iterable[str]) -> list[Step]:
    """Give each `STEP:key=value` to its step; UserError for a key without a step and for an unknown step."""
    by_name = {step.name: step for step in steps}
    for override in overrides:
        name, colon, setting = override.partition(":")
        if not colon or "=" in name:
            raise UserError(f"{override}: of which step?", f"write STEP:{override}; steps: {', '.join(by_name)}")
        if name not in by_name:
            raise UserError(f"{override}: unknown step '{name}'", did_you_mean(name, by_name, "steps"))
        step = by_name[name]
        by_name[name] = dataclasses.replace(step, overrides=(*step.overrides, setting))
    return list(by_name.values())


def part_of(steps: Sequence[Step], part: slice) -> Sequence[Step]:
    """The steps that `--from` and `--to` leave; UserError where the command line sets a key of one that they do not."""
    kept = steps[part]
    for step in steps:
        if step.overrides and step not in kept:
            raise UserError(
                f"{step.name}:{step.overrides[0]}: --from and --to leave out the step {step.name}",
                f"the steps that run: {', '.join(each.name for each in kept)}",
            )
    return kept


def run_pipeline(steps: Sequence[Step], cfg: RecipeConfig) -> list[StepResult]:
    """Run `steps` in order and return one result a step, up to the first that failed or got a signal.

    Args:
        cfg: the command line: config, profile, `--dry-run` (only plan and show), `--force` (skip nothing). Its
            overrides are not used: a step has its own.

    Raises:
        UserError: a step's config, script or input is refused; then no step has run.
        RunFailed: a step ended well and yet did not publish what its config names, or not as its own.
    """
    plan = plan_pipeline(steps, cfg)
    if cfg.dry_run:
        for number, planned in enumerate(plan, start=1):
            _say(f"[{number}/{len(plan)}] {planned.step.name}{planned.state}")
            display_job(planned.job, planned.job.resolved.spec, planned.job.env, show_config=False)
        return []
    results: list[StepResult] = []
    produced: dict[str, str | None] = {}
    signals: list[int] = []
    for number, step in enumerate(steps, start=1):
        job = _job(step, cfg, produced)
        planned = _planned(step, job, cfg, read=True)
        title = f"[{number}/{len(steps)}] {step.name}"
        _say(title + planned.state)
        if planned.versions:
            results.append(StepResult(step, "skipped", DONE, 0.0, job.run.dir, planned.versions))
        else:
            result = _run(step, job, signals)
            if result.exit_code == DONE and signals and number < len(steps):  # it came when the step was at its end
                code = INTERRUPTED if signal.SIGINT in signals else PREEMPTED
                result = dataclasses.replace(result, exit_code=code)
            results.append(result)
            if result.exit_code != DONE:
                # What failed after publishing, such as numbers outside their bands, would fail again.
                is_over = result.exit_code == REFUSED or (result.status == "failed" and published(job))
                goes_on = "" if is_over else "; the same command goes on from here"
                _say(f"{title}: {ended(result.exit_code)}{goes_on}")
                break
        produced.update({name: version.ref for name, version in results[-1].versions.items()})
    return results


def submit_pipeline(
    name: str, steps: Sequence[Step], cfg: RecipeConfig, submit: Submit, *, executor: str = "slurm"
) -> int:
    """Submit all `steps` that are not published yet at once, and return the exit code of the command.

    Args:
        name: what the jobs together are called; the config's name is appended.
        cfg: see `run_pipeline`.
        submit: the launcher; `submit_to_slurm` and `submit_each_to_ray` are those of this toolkit.
        executor: the executor of env.toml that `submit` is for.

    Raises:
        UserError: a step's config, script or input is refused, the profile has another executor, or it names no folder
            that the jobs share.
    """
    if executor_of(cfg.profile) != executor:
        raise UserError(
            f"profile {cfg.profile}: executor {executor_of(cfg.profile)} runs one step at a time",
            f"a pipeline needs executor {executor}",
        )
    plan = plan_pipeline(steps, cfg, (executor,))
    env = plan[0].job.env
    if env.output is None:
        raise UserError(
            f"profile {cfg.profile}: the jobs of a pipeline need a folder that all of them see",
            f'write env = {{ {OUTPUT_ROOT} = "/shared/output" }}',
        )
    # What the steps before a step publish is found in this folder: the very versions, not the latest.
    variables = {PUBLISHED_DIR: published_dir(env)}
    if not env.registry_is_reachable:
        _say("what is published already cannot be seen from here: every step runs")
    with ExitStack() as bundles:
        jobs: list[Bundle] = []
        for number, planned in enumerate(plan, start=1):
            job, spec = planned.job, planned.job.resolved.spec
            _say(f"[{number}/{len(plan)}] {planned.step.name}{planned.state}")
            if planned.versions:
                continue
            display_job(job, spec, job.env, show_config=cfg.dry_run)
            bundle = bundles.enter_context(create_bundle(job, spec, job.env, variables))
            jobs.append(bundle)
        if not jobs:
            return DONE
        _say(bundle.summary())
        return submit(job_name(f"{name}-{plan[0].job.resolved.loaded.name}"), jobs, cfg)


def submit_to_slurm(name: str, jobs: Sequence[Bundle], cfg: RecipeConfig) -> int:
    """Submit `jobs` as one experiment of NeMo-Run, each to start when the one before it has succeeded (see `Submit`).

    Raises:
        UserError: NeMo-Run is not installed, or Slurm refuses.
    """
    env = jobs[0].job.env
    if cfg.dry_run and not slurm.nemo_run_is_installed():
        _say(slurm.preview_text(name, {bundle.job.run.name: bundle.folder for bundle in jobs}, env))
        return DONE
    run = slurm.load_nemo_run(env)
    with slurm.open_experiment(name, env, dry_run=cfg.dry_run) as experiment:
        before: list[str] = []
        for bundle in jobs:
            job_title = bundle.job.run.name
            executor = slurm.create_executor(bundle.job.env, bundle.folder, job_title)
            script = run.Script(path="launch.sh", entrypoint="bash")
            before = [experiment.add(script, executor=executor, name=job_title, dependencies=before)]
        if cfg.dry_run:
            _say(slurm.submission_text(experiment, env))
            return DONE
        experiment.run(detach=True)
    for bundle in jobs:
        bundle.remove()
    return slurm.follow_or_leave(experiment, env, attached=cfg.attached)


def submit_to_ray(bundle: Bundle, cfg: RecipeConfig) -> int:
    """Hand one job to the Ray cluster of its profile, by Ray's own client; the rest is as in `Submit`.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or it refuses the job.
    """
    env = bundle.job.env
    job_id = ray.new_job_id(bundle.job.run.name)
    runtime_env = ray.ray_runtime_env(env, job_id, bundle.folder, bundle.plan.python_path, bundle.variables)
    if cfg.dry_run:
        if not ray.is_installed():
            _say(f"# Ray is not installed here. Submitting needs it: {install_line('ray')}")
        _say(ray.submission_text(env, job_id, runtime_env))
        return DONE
    job = ray.hand_over(env, job_id, runtime_env)
    bundle.remove()
    if cfg.attached:
        return follow_ray_job(job)  # a failed job is a failed command
    _say(ray.how_to_follow(job))
    return DONE


def submit_each_to_ray(name: str, jobs: Sequence[Bundle], cfg: RecipeConfig) -> int:
    """Hand `jobs` to the Ray cluster of their profile, each when the one before it has succeeded (see `Submit`).

    A Ray cluster starts what it is given at once, so this command waits for one job before it submits the next.

    Raises:
        UserError: `--batch` with several jobs; Ray is not installed, no cluster answers, or it refuses a job.
    """
    if len(jobs) > 1 and not cfg.attached:
        raise UserError(
            f"--batch {cfg.profile}: a Ray cluster starts every job at once, and these {len(jobs)} wait for each other",
            f"--run {cfg.profile} stays, and submits each when the one before it has succeeded",
        )
    for number, bundle in enumerate(jobs, start=1):
        code = submit_to_ray(bundle, cfg)
        if code != DONE:
            if number < len(jobs):
                _say(f"{name}: {', '.join(later.job.run.name for later in jobs[number:])} not submitted")
            return code
    return DONE


def first_failure(results: Iterable[StepResult]) -> int:
    """The exit code of steps that were run: that of the first one that did not end well."""
    return next((result.exit_code for result in results if result.exit_code), DONE)


def ended(code: int) -> str:
    """How a step ended that is not done, in words."""
    words = {INTERRUPTED: "interrupted", PREEMPTED: "stopped by a signal"}
    return words.get(code, f"failed with exit code {code}")


def published(job: Job) -> dict[str, Version]:
    """What a run with this job's fingerprint has published, by name; empty unless that is all of the job's outputs."""
    if job.run.fingerprint is None or not job.resolved.outputs or not job.env.registry_is_reachable:
        return {}
    registry = registry_of(job.env)
    candidates = {name: registry.find_published(name, job.run.fingerprint) for name in job.resolved.outputs}
    versions = {name: version for name, version in candidates.items() if version is not None}
    return versions if len(versions) == len(candidates) else {}


def plan_pipeline(steps: Sequence[Step], cfg: RecipeConfig, executors: Sequence[str] = EXECUTORS) -> list[PlannedStep]:
    """Validate all steps, each as if the ones before it had made what they promise. Nothing is run or written.

    Args:
        executors: see `parse_env`.

    Raises:
        UserError: a step's config, script, profile or input is refused.
    """
    if cfg.config_name is None:
        _check_default_of_all(steps)
    plan: list[PlannedStep] = []
    produced: dict[str, str | None] = {}
    for step in steps:
        try:
            job = _job(step, cfg, produced, executors)
        except UserError as error:
            raise error.at(f"step {step.name}") from None
        plan.append(_planned(step, job, cfg))
        if not plan[-1].versions:
            check_registry(job)
        for name in job.resolved.outputs:
            produced[name] = plan[-1].versions[name].ref if plan[-1].versions else None
    return plan


def _planned(step: Step, job: Job, cfg: RecipeConfig, *, read: bool = False) -> PlannedStep:
    """The step, skipped where all it would publish is there and whole.

    Files and sizes are compared. With `read` so is every byte of the versions on this machine that have up to
    READ_BYTES; what a later step takes as its input is read by that step, whatever its size.
    """
    versions = {} if cfg.force else published(job)
    try:
        for version in versions.values():
            registry = version.registry
            (registry.check_read if read and version.size_bytes <= READ_BYTES else registry.check_present)(version)
    except UserError as error:
        return PlannedStep(step, job, damage=error.message)
    return PlannedStep(step, job, versions, forced=cfg.force)


def _changes(job: Job) -> str:
    """What has changed since the newest version of what a job publishes; nothing where that cannot be said."""
    if not job.resolved.outputs or not job.env.registry_is_reachable:
        return ""
    before = next(registry_of(job.env).readable(job.resolved.outputs[0]), None)
    producer = before.record.get("producer") if before else None
    if before is None or (isinstance(producer, dict) and producer.get("fingerprint") == job.run.fingerprint):
        return ""
    try:
        changes = changes_since(before, job.resolved)
    except (UserError, ValueError):  # a record of the run that cannot be read
        return ""
    return f"changed since {before.ref}: {in_short(changes)}" if changes else ""


def _check_default_of_all(steps: Sequence[Step]) -> None:
    """UserError where a step lacks the default config; the hint lists the configs that every step has."""
    choices: list[set[str]] = []
    lacking = False
    for step in steps:
        spec = parse_runspec(step.script, step.configs)
        names = set(list_configs(spec.config_dir, spec.config.format))
        lacking |= spec.config.default + step.config_suffix not in names
        choices.append({name.removesuffix(step.config_suffix) for name in names if name.endswith(step.config_suffix)})
    if lacking:
        common = sorted(set.intersection(*choices))
        raise UserError(
            "no config was chosen, and not every step has a default one",
            f"choose one with -c NAME: {', '.join(common)}" if common else None,
        )


def _job(step: Step, cfg: RecipeConfig, produced: dict[str, str | None], executors: Sequence[str] = EXECUTORS) -> Job:
    spec = parse_runspec(step.script, step.configs)
    name = f"{cfg.config_name or spec.config.default}{step.config_suffix}" if step.config_suffix else cfg.config_name
    loaded = parse_config(dataclasses.replace(cfg, config_name=name, overrides=step.overrides), spec)
    spec = parse_runspec(find_script(step.configs or step.script.parent, loaded.run.script))
    env = parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=loaded, executors=executors)
    job = build_job_config(loaded, spec, env, dry_run=cfg.dry_run, argv=cfg.argv, produced=produced)
    if job.missing is not None:
        raise job.missing
    return job


def _run(step: Step, job: Job, signals: list[int]) -> StepResult:
    spec = job.resolved.spec
    display_job(job, spec, job.env, show_config=False)
    job_dir = save_configs(job, spec)
    started = time.monotonic()
    try:
        code = execute_local(spec, job_dir, build_env_vars(job, job.env), signals)
    except RunFailed as error:
        raise error.at(f"step {step.name}") from None
    seconds = time.monotonic() - started
    if code != DONE:
        return StepResult(step, "failed", code, seconds, job_dir)
    versions = published(job)
    if job.resolved.outputs and not versions:
        raise RunFailed(
            f"step {step.name} published {' and '.join(job.resolved.outputs)} without the fingerprint of its run",
            "if code was edited while it ran, run the same command again; the record of a script of yours has to name "
            f"{job.run.fingerprint} as its producer, as nemo_runspec.publish does",
        )
    return StepResult(step, "done", DONE, seconds, job_dir, versions)


def _say(text: str) -> None:
    print(text, flush=True)
