"""What a user sees before a job starts, and all that a dry run prints: what would run, where, on what, to make what."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, TextIO

from nemo_runspec.config.inputs import references_of
from nemo_runspec.config.resolve import config_text, config_to_ship
from nemo_runspec.profile import Env
from nemo_runspec.runspec import Runspec, recipe_name
from nemo_runspec.secrets import public, without_login
from nemo_runspec.words import shown

if TYPE_CHECKING:
    from nemo_runspec.job import Job

_WIDTH = 9


def display_job(job_config: Job, spec: Runspec, env: Env, *, show_config: bool | None = None) -> None:
    """Print the job to stdout.

    Args:
        show_config: print the resolved config too; by default where the command line says `--dry-run`.

    Raises:
        ArtifactError: an input of a dry run is missing.
    """
    print(job_text(job_config, spec, env, bold=_colored(sys.stdout, env)))
    if show_config or (show_config is None and "--dry-run" in job_config.argv):
        print(f"\n# {spec.job_config_name}")
        if env.executor == "local":
            print(config_text(job_config.resolved.data, spec, escape=spec.config.format == "omegaconf"), end="")
        else:
            print(config_to_ship(job_config.resolved))
    sys.stdout.flush()
    if job_config.missing is not None:
        raise job_config.missing


def job_text(job_config: Job, spec: Runspec, env: Env, *, bold: bool = False) -> str:
    """The summary of a job, one fact a line."""
    from nemo_runspec.execution.local import cpu_settings, local_command
    from nemo_runspec.execution.needs import needs_text

    loaded = job_config.resolved.loaded
    title = f"{recipe_name(job_config.resolved.run, spec)} -c {loaded.name}" + (
        f"  (profile {env.profile})" if env.profile else ""
    )
    lines = [f"\033[1m{title}\033[0m" if bold else title]

    def row(label: str, text: str) -> None:
        lines.append(f"  {label:<{_WIDTH}} {text}")

    row("script", shown(spec.script_path))
    row("config", " ".join([shown(loaded.path), *map(shlex.quote, loaded.overrides)]))
    references = references_of(job_config.resolved.run)
    for key, version in job_config.resolved.inputs.items():
        reference = references[key]
        pinned = f"{version.ref} ({version.digest[:10]})" if version else f"{reference} (resolved at start)"
        row("reads", f"{key} = {pinned}")
    for location in job_config.resolved.remote_files:
        row("reads", f"{location} (where the job runs)")
    for name in job_config.resolved.outputs:
        row("writes", name)
    folder = shown(job_config.run.dir)
    settings: dict[str, str] = {}
    if env.executor == "local":
        row("run dir", f"{folder} (exists)" if job_config.run.dir.is_dir() else folder)
        processes = job_config.resolved.run.get("processes") or 1
        command = local_command(spec, job_config.run.dir / spec.job_config_name, processes)
        row("command", " ".join(map(_quoted, command)))
        settings = {name: os.environ.get(name, value) for name, value in cpu_settings(processes).items()}
    else:
        row("run dir", folder)
        row("artifacts", str(env.artifacts))
        row("runs on", where(spec, env))
        if needs := needs_text(spec, env):
            row("needs", needs)
    if variables := {**settings, **spec.env, **env.variables}:
        row("env", " ".join(f"{name}={_quoted(public(name, value))}" for name, value in variables.items()))
    for name in env.secrets:
        row("secret", f"{name} (from the {'cluster' if env.ray else 'environment'})")
    return "\n".join(lines)


def where(spec: Runspec, env: Env) -> str:
    """Which machines a job of the profile gets, in one line."""
    if env.ray is not None:
        return f"Ray at {without_login(env.ray)}"
    if (slurm := env.slurm) is None:  # another launcher, whose keys only the command file knows
        return ", ".join([env.executor, *(f"{key} = {public(key, str(value))}" for key, value in env.table.items())])
    login = "here" if slurm.ssh is None else f"{slurm.ssh.user}@{slurm.ssh.host}"
    gpus = f" of {slurm.gpus_per_node} GPUs" if slurm.gpus_per_node else ""
    nodes = f"{slurm.nodes} node{'s' * (slurm.nodes > 1)}{gpus}"
    count = slurm.processes_per_node
    processes = f", {count} process{'es' * (count > 1)} each" if spec.run.launch == "torchrun" else ""
    if processes and slurm.launcher != "torchrun":
        processes += f" under {slurm.launcher}"
    partition = f", partition {slurm.partition}" if slurm.partition else ""
    image = f", in {slurm.container_image}" if slurm.container_image else ""
    return f"Slurm ({login}{partition}): {nodes}{processes}{image}"


def _quoted(word: str) -> str:
    return word if "<fingerprint>" in word else shlex.quote(word)


def _colored(stream: TextIO, env: Env) -> bool:
    return env.color and stream.isatty() and "NO_COLOR" not in os.environ
