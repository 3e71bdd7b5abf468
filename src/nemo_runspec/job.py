"""The pieces that a command file is made of: command line -> config -> runspec -> environment -> job.

Nothing here decides what runs where; a command file calls these in order and then starts the job itself::

    cfg = parse_recipe_config(ctx)
    spec = parse_runspec(STAGE / "train.py")
    train_config = parse_config(cfg, spec)
    spec = parse_runspec(find_script(STAGE, train_config.run.script))
    env = parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=train_config)
    job_config = build_job_config(train_config, spec, env, dry_run=cfg.dry_run, argv=cfg.argv)
    display_job(job_config, spec, env)
    job_dir = save_configs(job_config, spec)
    code = execute_local(spec, job_dir, build_env_vars(job_config, env))
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.loader import LoadedConfig, chosen_config, list_configs, load_config
from nemo_runspec.config.resolve import ResolvedConfig, config_text, resolve_config
from nemo_runspec.config.yaml_text import dump_yaml
from nemo_runspec.env import artifacts_root, output_root
from nemo_runspec.errors import DEBUG, ArtifactError, UserError, debugging
from nemo_runspec.execution.interrupts import say
from nemo_runspec.execution.needs import check_needs
from nemo_runspec.execution.remote_files import split_remote
from nemo_runspec.fingerprint import config_fingerprint, run_dir_for
from nemo_runspec.git import git_commit
from nemo_runspec.installation import check_dependencies, check_imports
from nemo_runspec.options import parse_words
from nemo_runspec.profile import Env, executor_of, parse_env
from nemo_runspec.runspec import Runspec, find_script
from nemo_runspec.runspec import parse as parse_runspec
from nemo_runspec.variables import ARTIFACTS_ROOT, ENV_FILE, FRESH, OUTPUT_ROOT
from nemo_runspec.words import shown
from nemo_runspec.write import write_in_one_step

if TYPE_CHECKING:
    import typer

    from nemo_runspec.artifacts import Registry

__all__ = [
    "CONTEXT_SETTINGS",
    "Job",
    "RecipeConfig",
    "build_env_vars",
    "build_job_config",
    "find_script",
    "job_name",
    "parse_config",
    "parse_env",
    "parse_recipe_config",
    "parse_runspec",
    "registry_of",
    "save_configs",
]

# For `app.command(context_settings=…)`: every word reaches `parse_recipe_config`, which knows all of them or refuses.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["-h", "--help"],
}
VALUED = {"-c": "config", "--config": "config", "--run": "run", "--batch": "batch"}
FLAGS = {"--dry-run": "dry_run", "--force": "force", "--debug": "debug"}


@dataclass(frozen=True)
class RecipeConfig:
    """What the command line of a recipe command says.

    `profile`: of env.toml, from `--run` or `--batch`; `batch`: it was `--batch`. `force`: start afresh instead of going
    on with an unfinished run; of a pipeline, skip nothing.
    """

    config_name: str | None = None
    overrides: tuple[str, ...] = ()
    profile: str | None = None
    batch: bool = False
    dry_run: bool = False
    force: bool = False
    argv: tuple[str, ...] = ()

    @property
    def attached(self) -> bool:
        """Whether the command stays with a job that it submits (`--run`, not `--batch`)."""
        return not self.batch


@dataclass(frozen=True)
class RunInfo:
    """Identity of a job: its name, the folder it runs in, and the fingerprint; None where inputs do not exist yet.

    `name` is the config's `run.name`, with a dash for what may not stand in the name of a folder.
    """

    name: str
    dir: Path
    fingerprint: str | None


@dataclass(frozen=True)
class Job:
    """A job ready to be shown, saved and started: the resolved config and where it comes from.

    `missing`: of a dry run, an input that is not there; `display_job` shows all else and raises it.
    """

    resolved: ResolvedConfig
    run: RunInfo
    env: Env
    argv: tuple[str, ...] = ()
    missing: ArtifactError | None = None


def parse_recipe_config(ctx: typer.Context, **keys: str | None) -> RecipeConfig:
    """Read the words of a recipe command, whose context has CONTEXT_SETTINGS.

    Args:
        keys: keys of the config that options of the command's own set, with their values; None: not on the line.

    Raises:
        UserError: an unknown option, an option without its value, a stray word, `--run` together with `--batch`, an
            unknown profile, `--batch` with a profile that has nothing to submit to.
    """
    declared = [option for parameter in ctx.command.params for option in parameter.opts if option.startswith("-")]
    options = parse_words(ctx.args, valued=VALUED, flags=FLAGS, known=declared)
    values = options.values
    if "run" in values and "batch" in values:
        raise UserError("--run and --batch exclude each other", "--run stays attached to the job; --batch submits it")
    profile = values.get("run", values.get("batch"))
    if executor_of(profile) == "local" and "batch" in values:
        raise UserError(f"--batch {profile}: a local profile has nothing to submit to", f"run it here: --run {profile}")
    return RecipeConfig(
        config_name=values.get("config"),
        overrides=(*options.overrides, *(f"{key}={value}" for key, value in keys.items() if value is not None)),
        profile=profile,
        batch="batch" in values,
        dry_run="dry_run" in options.flags,
        force="force" in options.flags,
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]),
    )


def parse_config(cfg: RecipeConfig, spec: Runspec) -> LoadedConfig:
    """Load the config that the command line chose, or the default one, from the config folder of `spec`.

    A config that names no script (`run.script`) is for that of `spec`.

    Raises:
        UserError: see `chosen_config` and `load_config`; the config names the script of another stage.
    """
    name = chosen_config(spec, cfg.config_name)
    loaded = load_config(spec.config_dir, name, cfg.overrides, spec.config.format, spec.script_path.name)
    if not isinstance(loaded.run.script, str):
        raise UserError(f"{loaded.origin(('run', 'script'))}: run.script = {loaded.run.script!r}: must be text")
    script = find_script(spec.script_path.parent, loaded.run.script)
    if script.parent != spec.script_path.parent and script.is_file():
        other = parse_runspec(script)
        if other.stage != spec.stage and not other.stage.startswith(f"{spec.stage}/"):
            raise UserError(
                f"{loaded.origin(('run', 'script'))}: run.script = {loaded.run.script!r}: a script of the stage "
                f"{other.stage!r}, and this is {spec.stage!r}"
            )
    return loaded


def build_job_config(
    train_config: LoadedConfig,
    spec: Runspec,
    env: Env,
    *,
    dry_run: bool,
    argv: Sequence[str] = (),
    produced: Mapping[str, str | None] | None = None,
) -> Job:
    """Resolve and validate the config, look up its inputs, and find the run's folder. Nothing is written.

    Inputs are looked up in the registry of the profile. Where that cannot be reached from here (a folder behind an ssh
    login), the job looks them up when it starts.

    Args:
        dry_run: nothing is downloaded or published, and a login node that does not answer costs a note. An input that
            is missing is noted in the job, so that all else can be shown before the refusal.
        argv: the command line, for `job.yaml`.
        produced: see `resolve_config`; for the steps of a pipeline.

    Raises:
        UserError: see `resolve_config`; a file of an input is gone; what the script imports is not installed here,
            where it runs, or in the environment that the profile names; no `run.workdir`; see `check_registry`.
    """
    if spec.run.workdir is not None and not spec.run.workdir.is_dir():
        raise UserError(f"{shown(spec.script_path)}: run.workdir: no such folder: {shown(spec.run.workdir)}")
    if env.executor == "local" and spec.run.cmd.split()[0] in ("python", "python3"):
        check_imports(spec.script_path)
        image = (getattr(train_config.run, "env", None) or {}).get("container_image")
        check_dependencies(spec, image, functools.partial(_for_another_script, spec, train_config.config_dir))
    elif env.executor != "local":
        check_needs(spec, env, dry_run=dry_run)
    resolve = functools.partial(
        resolve_config,
        train_config,
        spec,
        look_up=env.registry_is_reachable,
        registry=registry_of(env),
        found_here=None if env.executor == "local" else functools.partial(split_remote, env, dry_run=dry_run),
        publish=not dry_run,
    )
    known, missing = dict(produced or {}), list[ArtifactError]()
    while True:
        try:
            resolved = resolve(produced=known)
            break
        except ArtifactError as error:
            if not dry_run or error.corrupt or error.name in known:
                raise missing[0] if missing else error from None
            missing.append(error)
            known[error.name] = None  # as if it were still to come
    _check_machines(resolved, spec, env)
    versions = {key: version for key, version in resolved.inputs.items() if version is not None}
    for version in versions.values():
        version.registry.check_present(version)
    if len(versions) < len(resolved.inputs) or resolved.remote_files:
        digits = None
    else:
        digits = config_fingerprint(resolved.model or resolved.data, spec, versions)
    folder = run_dir_for(resolved.data, spec, digits or "<fingerprint>", root=env.output)
    run = RunInfo(job_name(resolved.run["name"]), folder, digits)
    job = Job(resolved, run, env, tuple(argv), missing[0] if missing else None)
    if produced is None and not missing:  # a step of a pipeline may have published all before
        check_registry(job)
    return job


def check_registry(job: Job) -> None:
    """Refuse a job of this machine that cannot publish into the folder of its registry; nothing is written.

    One behind a URL, or seen from other machines, is asked by the job itself when it starts.
    """
    if job.env.executor == "local" and job.resolved.outputs and not (registry := registry_of(job.env)).is_remote:
        registry.check_writable(job.resolved.outputs)


def _check_machines(resolved: ResolvedConfig, spec: Runspec, env: Env) -> None:
    """Ask the config, an instance of the script's schema, whether it fits the machines that the job gets.

    Raises:
        UserError: it does not.
    """
    check = getattr(resolved.model, "check_machines", None)
    if check is None:
        return
    if env.slurm is not None:
        machines = f"{env.nodes} nodes of {env.processes_per_node} processes, profile {env.profile}"
        shape = env.nodes, env.processes_per_node, env.slurm.launcher
        hint = "another config, or other machines: run.env.nodes=N and the like, or those of the profile"
    elif env.executor == "local":
        from nemo_runspec.execution.local import local_processes

        count = local_processes(spec, resolved.run.get("processes"))
        if count == 1:  # whether a published layout fits one process is for its script to say
            return
        machines, shape = f"{count} processes of this machine", (1, count, "torchrun")
        hint = "another config, or another number: run.processes=N, and of visible GPUs by CUDA_VISIBLE_DEVICES"
    else:
        return
    try:
        warnings = check(*shape)
    except ValueError as error:
        raise UserError(f"{spec.name} on {machines}: {error}", hint) from None
    for warning in warnings:
        say(f"warning: {warning}")


def _for_another_script(spec: Runspec, config_dir: Path) -> list[str]:
    """Configs in a folder that name another script than this one; those that cannot be read are passed over."""
    names = []
    for name in list_configs(config_dir, spec.config.format):
        with contextlib.suppress(UserError):
            script = vars(load_config(config_dir, name, (), spec.config.format).run).get("script")
            if isinstance(script, str) and Path(script).name != spec.script_path.name:
                names.append(name)
    return names


def job_name(text: str) -> str:
    """`text` with a dash for what may not stand in the name of a job, which is that of its folder too."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "job"


def registry_of(env: Env) -> Registry:
    """The registry that a job under this profile reads and publishes to."""
    from nemo_runspec.artifacts import Registry

    for name, value in env.variables.items():
        if name.startswith(("AWS_", "GOOGLE_", "FSSPEC_", "WANDB_")):  # a store is asked from here as the job asks it
            os.environ[name] = value
    return Registry.default() if env.artifacts is None else Registry(env.artifacts)


def save_configs(job_config: Job, spec: Runspec) -> Path:
    """Write `job.yaml` (provenance) and the script's config (`train.yaml`) into the run's folder; return the folder.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = job_config.run.dir
    train = config_text(job_config.resolved.data, spec, escape=spec.config.format == "omegaconf")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_in_one_step(folder / "job.yaml", job_yaml(job_config, spec))
        write_in_one_step(folder / spec.job_config_name, train)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # `run_main` has the words for a full disk
        raise UserError(f"cannot write {folder}: {error.strerror}", f"{OUTPUT_ROOT} names another place") from None
    return folder


def job_yaml(job: Job, spec: Runspec, code: Mapping[str, Any] | None = None) -> str:
    """The text of `job.yaml`: where a job comes from.

    Args:
        code: digest, commit and uncommitted files of the code that travels with it, if any does.
    """
    loaded = job.resolved.loaded
    provenance = {
        "name": job.run.name,
        "fingerprint": job.run.fingerprint,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": list(job.argv),
        "config": str(loaded.path),
        "dotlist": list(loaded.overrides),
        "profile": job.env.profile,
        "executor": job.env.executor,
        "git_commit": git_commit(spec.script_path.parent),
        "inputs": {key: None if version is None else version.pinned for key, version in job.resolved.inputs.items()},
        "outputs": list(job.resolved.outputs),
        "code": code,
        "runspec": spec.to_dict(),
        "train": job.resolved.data,
    }
    return dump_yaml({key: value for key, value in provenance.items() if key != "code" or value}, escape=False)


def job_variables(job: Job, env: Env) -> dict[str, str]:
    """The variables to set for a job wherever it runs: the script's `[env]`, the profile's, `--debug` and `--force`,
    or what the environment of the command says in their place."""
    variables = {**job.resolved.spec.env, **env.variables}
    if env.cache_dir is not None:
        variables.setdefault("XDG_CACHE_HOME", str(env.cache_dir))
    if debugging():
        variables[DEBUG] = "1"
    if "--force" in job.argv or os.environ.get(FRESH):
        variables[FRESH] = "1"
    return variables


def build_env_vars(job_config: Job, env: Env) -> dict[str, str]:
    """The variables to set for a job on this machine, over the environment that it inherits.

    Those of `job_variables`, then the roots of runs and artifacts as absolute paths, so that a script with another
    working directory finds the same ones. Secrets are not among them: they are inherited.
    """
    variables = job_variables(job_config, env)
    variables[OUTPUT_ROOT] = str(output_root())
    variables[ARTIFACTS_ROOT] = env.artifacts or str(artifacts_root())
    if env.file is not None:
        variables[ENV_FILE] = str(env.file.absolute())
    return variables
