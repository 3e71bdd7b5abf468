"""The bundle of a job: all that travels to a cluster, composed from the job, the script and the profile.

`packaging` says which code, `config.resolve` which config, `launch_script` how a node starts it; here they meet, in a
temporary folder that exists for as long as submitting takes: what follows the job works with the engine's copy.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.config.resolve import config_to_ship
from nemo_runspec.env.file import tool_variables
from nemo_runspec.execution.launch_script import JSON_NAME, SCRIPT_NAME, Launch, launch_json, launch_script
from nemo_runspec.job import Job, job_variables, job_yaml
from nemo_runspec.packaging import BundlePlan, PackedCode, pack_code, plan_bundle
from nemo_runspec.profile import Env
from nemo_runspec.runspec import Runspec
from nemo_runspec.variables import ARTIFACTS_ROOT, CODE_DIGEST, GIT_COMMIT, OUTPUT_ROOT
from nemo_runspec.words import counted

_SHOWN_UNCOMMITTED = 10


@dataclass(frozen=True)
class Bundle:
    """What travels, in `folder`: `launch.sh`, `launch.json`, `job.yaml`, the script's config, and the code of `plan`.

    `job` is whose it is; `code` is what of the plan was packed; `variables` are what launch.sh sets.
    """

    job: Job
    folder: Path
    plan: BundlePlan
    code: PackedCode
    variables: dict[str, str]

    def remove(self) -> None:
        """Remove the folder before its time: the engine has a copy, and following the job may take days."""
        shutil.rmtree(self.folder)

    def summary(self) -> str:
        """One line a fact: how much code, of which commit, and what of it is not committed."""
        plan, code = self.plan, self.code
        commit = "no git commit" if plan.commit is None else f"commit {plan.commit.removesuffix('-dirty')[:10]}"
        files = counted(len(plan.files), "file")
        lines = [
            f"  {'code':<9} {files}, {human_size(code.size)}, digest {code.digest[:10]}, {commit}",
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


@contextmanager
def create_bundle(job: Job, spec: Runspec, env: Env, variables: dict[str, str] | None = None) -> Iterator[Bundle]:
    """The bundle of `job`, in a folder that is gone afterwards.

    Args:
        variables: more of them for the job, over all others.

    Raises:
        UserError: see `plan_bundle`, `pack_code` and `launch_script`.
    """
    stays = () if env.slurm is None or env.slurm.job_dir is None else (Path(env.slurm.job_dir),)
    plan = plan_bundle(spec, limit=env.code_limit, leave_out=stays)
    launch = Launch(
        name=str(job.run.name),
        launch=spec.run.launch,
        script=plan.script,
        config=spec.job_config_name,
        cmd=spec.run.cmd,
        workdir=plan.workdir or _shared_folder(env),
        processes_per_node=env.processes_per_node,
        launcher="torchrun" if env.slurm is None else env.slurm.launcher,
        launcher_options=[] if env.slurm is None else list(env.slurm.launcher_options),
    )
    with tempfile.TemporaryDirectory(prefix="runspec-bundle-") as place:
        folder = Path(place) / "code"
        code = pack_code(plan, folder)
        all_variables = {**_variables(job, env, plan, code), **(variables or {})}
        texts = {
            SCRIPT_NAME: launch_script(
                all_variables,
                python_path=plan.python_path,
                startup_commands=env.startup_commands,
                secrets=env.secrets,
                executor=env.executor,
            ),
            JSON_NAME: launch_json(launch),
            "job.yaml": job_yaml(
                job,
                spec,
                code={"digest": code.digest, "commit": plan.commit, "uncommitted": list(plan.uncommitted)},
            ),
            spec.job_config_name: config_to_ship(job.resolved),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755 if name == SCRIPT_NAME else 0o644)
        yield Bundle(job, folder, plan, code, all_variables)


def _shared_folder(env: Env) -> str | None:
    """The folder in which the command was given, where the nodes have it too; paths in a config mean the same there."""
    return str(Path.cwd()) if env.slurm is not None and env.slurm.ssh is None else None


def _variables(job: Job, env: Env, plan: BundlePlan, code: PackedCode) -> dict[str, str]:
    """What `launch.sh` sets: `job_variables`, the roots as the job sees them, where the code comes from.

    env.toml stays here, so what its [tool] tables say to other programs travels as variables.
    """
    variables = {**tool_variables(), **job_variables(job, env)}
    if env.output is not None:
        variables[OUTPUT_ROOT] = env.output
    if env.artifacts is not None:
        variables[ARTIFACTS_ROOT] = env.artifacts
    variables[CODE_DIGEST] = code.digest
    if plan.commit is not None:
        variables[GIT_COMMIT] = plan.commit
    return variables
