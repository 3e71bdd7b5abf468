"""The bundle of a job: all that travels to a cluster, composed from the job, the script and the profile.

`packaging` says which code, `config.resolve` which config, `launch_script` how a node starts it; here they meet.
Nothing is written before `Bundle.written`, so that a dry run can show every file.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.config.resolve import config_to_ship
from nemo_runspec.env import Env, wandb_settings
from nemo_runspec.errors import DEBUG, debugging
from nemo_runspec.execution.launch_script import Launch, launch_json, launch_script
from nemo_runspec.job import Job, job_yaml
from nemo_runspec.packaging import BundlePlan, megabytes, plan_bundle, write_bundle
from nemo_runspec.runspec import Runspec
from nemo_runspec.variables import ARTIFACTS_ROOT, CODE_DIGEST, FRESH, GIT_COMMIT, OUTPUT_ROOT

_SHOWN_UNCOMMITTED = 10


@dataclass(frozen=True)
class Bundle:
    """What would travel: the plan of the code, and the texts of the four files that are made for the job.

    `variables` are what launch.sh sets.
    """

    plan: BundlePlan
    launch: Launch
    variables: dict[str, str]
    launch_sh: str
    launch_json: str
    job_yaml: str
    train_yaml: str

    @contextmanager
    def written(self) -> Iterator[Path]:
        """The bundle in a folder, for as long as submitting takes."""
        with tempfile.TemporaryDirectory(prefix="runspec-bundle-") as folder:
            yield write_bundle(
                self.plan,
                Path(folder) / "code",
                launch_sh=self.launch_sh,
                launch_json=self.launch_json,
                job_yaml=self.job_yaml,
                train_yaml=self.train_yaml,
            )

    def summary(self) -> str:
        """One line a fact: how much code, of which commit, and what of it is not committed."""
        plan = self.plan
        commit = "no git commit" if plan.commit is None else f"commit {plan.commit.removesuffix('-dirty')[:10]}"
        lines = [
            f"  {'code':<9} {len(plan.files)} files, {megabytes(plan.size)}, digest {plan.digest[:10]}, {commit}",
        ]
        shown = plan.uncommitted[:_SHOWN_UNCOMMITTED]
        lines += [f"  {'' if index else 'changed':<9} {path}" for index, path in enumerate(shown)]
        if len(plan.uncommitted) > len(shown):
            lines.append(f"  {'':<9} and {len(plan.uncommitted) - len(shown)} more")
        return "\n".join(lines)


def published_dir(env: Env) -> str:
    """A new folder, shared by the jobs of one pipeline, in which each leaves what it has published."""
    root = env.output if env.slurm is None else env.slurm.job_dir
    return f"{root}/published/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def create_bundle(
    job: Job, spec: Runspec, env: Env, variables: dict[str, str] | None = None, processes_per_node: int = 1
) -> Bundle:
    """Compose the bundle of `job`. Nothing is written.

    Args:
        variables: more of them for the job, over all others.
        processes_per_node: that torchrun starts; for Slurm the profile says it.

    Raises:
        UserError: see `plan_bundle` and `launch_script`.
    """
    stays = () if env.slurm is None or env.slurm.job_dir is None else (Path(env.slurm.job_dir),)
    plan = plan_bundle(spec, limit=env.code_limit, leave_out=stays)
    launch = Launch(
        name=str(job.run.name),
        launch=spec.run.launch,
        script=plan.script,
        config=plan.config_name,
        cmd=spec.run.cmd,
        workdir=plan.workdir or _shared_folder(env),
        executor=env.executor,
        processes_per_node=processes_per_node if env.slurm is None else env.slurm.processes_per_node,
    )
    all_variables = {**_variables(job, env, plan), **(variables or {})}
    return Bundle(
        plan=plan,
        launch=launch,
        variables=all_variables,
        launch_sh=launch_script(
            all_variables,
            python_path=plan.python_path,
            startup_commands=env.startup_commands,
            secrets=env.secrets,
            inherits_job_dir=env.executor == "ray",
        ),
        launch_json=launch_json(launch),
        job_yaml=job_yaml(job, spec, code=plan.code),
        train_yaml=config_to_ship(job.resolved),
    )


def _shared_folder(env: Env) -> str | None:
    """The folder in which the command was given, where the nodes have it too; paths in a config mean the same there."""
    return str(Path.cwd()) if env.slurm is not None and env.slurm.ssh is None else None


def _variables(job: Job, env: Env, plan: BundlePlan) -> dict[str, str]:
    """What `launch.sh` sets: the script's `[env]`, the profile's, the roots as the job sees them, where it comes from.

    env.toml stays here, so its table [wandb] travels as the variables that W&B itself has for it.
    """
    variables = {**job.resolved.spec.env, **env.variables}
    for key, value in (wandb_settings() or {}).items():
        variables.setdefault(f"WANDB_{key.upper()}", value)
    if env.output is not None:
        variables[OUTPUT_ROOT] = env.output
    if env.artifacts is not None:
        variables[ARTIFACTS_ROOT] = env.artifacts
    if env.cache_dir is not None:
        variables.setdefault("XDG_CACHE_HOME", str(env.cache_dir))
    variables[CODE_DIGEST] = plan.digest
    if plan.commit is not None:
        variables[GIT_COMMIT] = plan.commit
    if debugging():
        variables[DEBUG] = "1"
    if "--force" in job.argv or os.environ.get(FRESH):
        variables[FRESH] = "1"
    return variables
