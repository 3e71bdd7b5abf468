"""The command `pretrain`, with SkyPilot in place of NeMo-Run: a fork of one command file.

It replaces the `pretrain.py` of a family; nothing else changes. Steps 1 to 3 are those of the original but for
`executors=` and the two lines after it. Step 4 is new, and below it stands all that knows SkyPilot: the program `sky`,
which wants an older click than this project and lives in an environment of its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_runspec import job
from nemo_runspec.bundle import create_bundle
from nemo_runspec.config.yaml_text import dump_yaml
from nemo_runspec.display import display_job
from nemo_runspec.env.roots import is_url
from nemo_runspec.errors import DONE, FAILED, INTERRUPTED, PREEMPTED, Interrupted, RunFailed, UserError, report
from nemo_runspec.execution.interrupts import CancelQuestion, noted_signals
from nemo_runspec.execution.local import execute_local
from nemo_runspec.execution.remote_files import in_remote_folders
from nemo_runspec.packaging import contents
from nemo_runspec.profile import Env
from nemotron.cli.recipe_dir import recipe_dir

STAGE = recipe_dir("nano3/stage0_pretrain")
INSTALL_SKY = "pipx install 'skypilot[aws]' (the extra names your cloud)"


def pretrain(ctx: typer.Context) -> None:
    """Pretrain the base model (stage 0)."""
    raise typer.Exit(_execute_pretrain(job.parse_recipe_config(ctx)))


def _execute_pretrain(cfg: job.RecipeConfig) -> int:
    # 1. Config. nemo_runspec does not know the executor `skypilot`: it hands its keys over unread, in `env.table`.
    spec = job.parse_runspec(STAGE / "train.py")
    train_config = job.parse_config(cfg, spec)
    spec = job.parse_runspec(job.find_script(STAGE, train_config.run.script))
    executors = ("local", "skypilot")
    env = job.parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=train_config, executors=executors)
    sky = SkySettings() if env.executor == "local" else read_settings(env)
    env = env if env.executor == "local" else with_roots(env)
    job_config = job.build_job_config(train_config, spec, env, dry_run=cfg.dry_run, argv=cfg.argv)
    # 2. Show. A dry run goes through the same checks as a real one.
    display_job(job_config, spec, env)
    # 3. Here: a subprocess, torchrun if there are several GPUs.
    if env.executor == "local":
        if cfg.dry_run:
            return 0
        job_dir = job.save_configs(job_config, spec)
        return execute_local(spec, job_dir, job.build_env_vars(job_config, env))
    # 4. There: SkyPilot finds machines, a "cluster" in its words, brings the bundle to each and runs launch.sh in it.
    cluster = f"{re.sub(r'[^a-z0-9]+', '-', job_config.run.name.lower()).strip('-')}-{secrets.token_hex(3)}"
    with create_bundle(job_config, spec, env) as bundle:
        print(bundle.summary())
        # Without this file SkyPilot leaves behind what any .gitignore in the bundle names, tracked or not.
        (bundle.folder / ".skyignore").touch()
        task = bundle.folder.with_name("task.yaml")
        task.write_text(task_yaml(sky, job_config.run.name, bundle.folder), encoding="utf-8")
        # Secrets are named; `sky` takes their values from its environment.
        words = ["sky", "launch", "--yes", "--detach-run", "--cluster", cluster]
        if sky.idle_minutes:
            words += ["--idle-minutes-to-autostop", str(sky.idle_minutes), "--down"]
        words += [word for name in env.secrets for word in ("--secret", name)]
        words.append(str(task))
        if cfg.dry_run:
            if shutil.which("sky") is None:
                print(f"# the program sky is not installed here. Submitting needs it: {INSTALL_SKY}\n")
            print(f"# submitted with\n{shlex.join(words)}\n\n# task.yaml\n{task.read_text(encoding='utf-8')}")
            print(f"# launch.sh, run on each node\n{(bundle.folder / 'launch.sh').read_text(encoding='utf-8')}")
            print("\n".join(["# what travels, to ~/sky_workdir of each node", *contents(bundle.folder)]))
            return 0
        launch(words, cluster, env)
    if cfg.attached:
        return follow(cluster)  # a failed job is a failed command
    print(how_to_follow(cluster))
    return 0


class SkySettings(BaseModel):
    """The keys of a profile with `executor = "skypilot"`. None: SkyPilot chooses."""

    model_config = ConfigDict(extra="forbid", strict=True)

    infra: str | None = Field(None, pattern=r"^\w[\w.:@/*-]*$", description='a place, as "aws" or "slurm/cluster"')
    nodes: int = Field(1, ge=1)
    gpu: str | None = Field(None, pattern=r"^\w[\w.-]*$", description='a type of GPU, as "H100" (`sky gpus list`)')
    gpus_per_node: int = Field(0, ge=0)
    processes_per_node: int = Field(1, ge=1)  # in launch.json: torchrun starts as many on each node
    cpus: str | None = Field(None, pattern=r"^[0-9]+\+?$", description='of a node: "16", or "16+" for at least 16')
    memory: str | None = Field(None, pattern=r"^[0-9]+\+?$", description='GB of a node: "64", or "64+"')
    container_image: str | None = None
    # The machines are given back after so long without a job; 0: only when the attached command ends, for places where
    # SkyPilot cannot do that by itself (Slurm without containers).
    idle_minutes: int = Field(10, ge=0)


def read_settings(env: Env) -> SkySettings:
    """What the command line, the config, the profile and the script's own block come to.

    Raises:
        UserError: an unknown key, a wrong value, GPUs without their type.
    """
    try:
        sky = SkySettings(**env.table)
    except ValidationError as error:
        fault = error.errors()[0]
        at = f"profile {env.profile}: {'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
        raise UserError(at, f"keys of executor skypilot: {', '.join(SkySettings.model_fields)}") from None
    if sky.gpus_per_node and sky.gpu is None:
        at = f"profile {env.profile}: {sky.gpus_per_node} GPUs a node, and nothing says of which type"
        raise UserError(at, 'write gpu = "H100", say, or gpus_per_node = 0')
    return sky


def with_roots(env: Env) -> Env:
    """Where runs and artifacts are over there. Runs lie on the disk of a node, unless the profile names a folder.

    Raises:
        UserError: artifacts would be published on machines that go away: in a folder that is not marked as mounted.
    """
    root = env.artifacts
    if root is None or not (is_url(root) or in_remote_folders(env, root)):
        at = f"profile {env.profile}: the machines of executor skypilot go away with what is published on them"
        hint = 'write artifacts = "s3://bucket/prefix"'
        if root is not None:
            at += f", in {root}"
            hint += f"; where all machines mount {root}, add remote_folders = [{json.dumps(root)}]"
        raise UserError(at, hint)
    return replace(env, output=env.output or "~/nemotron-output")


# What SkyPilot starts on every node, in its copy of the bundle. `execution/place.py` reads these variables.
RUN = """\
export RUNSPEC_NODE_RANK=$SKYPILOT_NODE_RANK RUNSPEC_NUM_NODES=$SKYPILOT_NUM_NODES RUNSPEC_ATTEMPT=$SKYPILOT_TASK_ID
export MASTER_ADDR=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
bash launch.sh
"""


def task_yaml(sky: SkySettings, name: str, bundle: Path) -> str:
    """The text of the task. No value of a secret is in it, nor its name (`sky launch --secret NAME` has that)."""
    resources = {
        "infra": sky.infra,
        "accelerators": f"{sky.gpu}:{sky.gpus_per_node}" if sky.gpus_per_node else None,
        "cpus": sky.cpus,
        "memory": sky.memory,
        "image_id": f"docker:{sky.container_image}" if sky.container_image else None,
    }
    stated = {key: value for key, value in resources.items() if value is not None}
    task = {"name": name, "workdir": str(bundle), "num_nodes": sky.nodes, "resources": stated}
    run = "".join(f"  {line}\n" for line in RUN.splitlines())
    return f"{dump_yaml(task, escape=False)}run: |\n{run}"


def launch(words: list[str], cluster: str, env: Env) -> None:
    """Submit; what `sky` says goes to stderr.

    Raises:
        UserError: `sky` is not installed.
        RunFailed: it found no machines, or could not set them up.
    """
    if shutil.which("sky") is None:
        raise UserError(
            f"profile {env.profile}: executor skypilot needs the program sky, which is not installed",
            f"install it in an environment of its own: {INSTALL_SKY}",
        )
    try:
        code = call_sky(words)
    except KeyboardInterrupt:
        raise Interrupted(f"{cluster} may be on its way up", f"give it back: sky down {cluster}") from None
    if code != DONE:
        hint = f"what is there: sky status {cluster}; give it back: sky down {cluster}"
        raise RunFailed(f"sky launch ended with exit code {code}", hint)


def how_to_follow(cluster: str) -> str:
    """What `--batch` prints: SkyPilot's own commands."""
    return (
        f"{cluster}: submitted\n  follow   sky logs {cluster} 1\n"
        f"  inspect  sky queue {cluster}\n  cancel   sky down {cluster}"
    )


def follow(cluster: str) -> int:
    """Print the log of the job until it ends, and give its machines back.

    Ctrl-C asks once whether to cancel; without a terminal a second one cancels. SIGTERM leaves the job running.

    Returns:
        0 done; 1 failed (SkyPilot does not say with which exit code); 130 cancelled by Ctrl-C; 143 after SIGTERM.
    """
    question, command = CancelQuestion(), ["sky", "logs", "--tail", "0", cluster, "1"]
    with noted_signals() as signals:
        # A session of its own: the terminal's Ctrl-C is for us.
        logs = subprocess.Popen(
            command, env=environment(), cwd=Path.home(), stdin=subprocess.DEVNULL, start_new_session=True
        )
        while logs.poll() is None:
            if not signals:
                time.sleep(0.2)
            elif signals.pop(0) == signal.SIGTERM:
                logs.terminate()
                print(f"stopped by SIGTERM; not cancelled\n{how_to_follow(cluster)}", file=sys.stderr)
                return PREEMPTED
            elif question.ask(cluster):
                logs.terminate()
                give_back(cluster)
                report(Interrupted(f"{cluster} cancelled"))
                return INTERRUPTED
    ended = {0: "", 100: "failed", 103: "was cancelled by somebody else"}  # any other code says nothing of the job
    if logs.returncode not in ended:
        report(RunFailed(f"sky logs ended with exit code {logs.returncode}, not the job", how_to_follow(cluster)))
        return FAILED
    give_back(cluster)
    if how := ended[logs.returncode]:
        report(RunFailed(f"the job of {cluster} {how}"))
    return FAILED if how else DONE


def give_back(cluster: str) -> None:
    """End the machines of a job."""
    words = ["sky", "down", "--yes", cluster]
    if call_sky(words) != DONE:
        print(f"{cluster} may still be up, and cost: {shlex.join(words)}", file=sys.stderr)


def call_sky(words: list[str]) -> int:
    """Run `sky`; what it prints goes to stderr."""
    # SkyPilot's server, which the first call starts, stays in this folder and fails once it is gone.
    return subprocess.run(words, env=environment(), cwd=Path.home(), stdin=subprocess.DEVNULL, stdout=2).returncode


def environment() -> dict[str, str]:
    """That of this process, without what would lead `sky` to modules of this project's environment."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
