"""A job for a Ray cluster that exists: what Ray is told of it, handing it over, and Ray's own commands for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shlex
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.errors import UserError, first_line
from nemo_runspec.execution.launch_script import SCRIPT_NAME
from nemo_runspec.installation import install_line
from nemo_runspec.packaging import contents
from nemo_runspec.profile import RAY_API_SERVER, Env
from nemo_runspec.secrets import looks_secret, without_login
from nemo_runspec.variables import JOB_DIR, RAY_ADDRESS

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ENTRYPOINT = f"bash {SCRIPT_NAME}"
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class RayJob:
    """A submitted job: its id (Ray's "submission id") and the address of the cluster's dashboard."""

    id: str
    address: str

    @property
    def shown_address(self) -> str:
        """The address as it may be printed."""
        return without_login(self.address)


def new_job_id(name: str) -> str:
    """An id for a job that says what it is and that no other one has: `demo-train-3f9c2a`."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"{words}-{secrets.token_hex(3)}"


def ray_runtime_env(
    env: Env, job_id: str, bundle: Path, python_path: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """What Ray is told about the processes of a job, its workers included; its dashboard shows it to everybody.

    Args:
        bundle: the folder that becomes the current directory of all of them.
        python_path: folders in it that hold packages.
        variables: those of the job. One whose name is that of a secret stays out; `launch.sh` sets it for the script.
    """
    shown = {name: value for name, value in variables.items() if not looks_secret(name)}
    shown["PYTHONPATH"] = ":".join(python_path)
    if env.output is not None:
        shown.setdefault(JOB_DIR, f"{env.output}/jobs/{job_id}")
    return {"working_dir": str(bundle), "env_vars": shown}


def submission_text(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> str:
    """All that `hand_over` would send, as text, with `<id>` for what is random in the job's id. Ray is not imported."""
    bundle = Path(str(runtime_env["working_dir"]))
    others = {key: value for key, value in runtime_env.items() if key != "working_dir"}
    command = ["ray", "job", "submit", "--address", without_login(_address(env)), "--submission-id", job_id]
    command += ["--working-dir", str(bundle), "--runtime-env-json", json.dumps(others), "--", *ENTRYPOINT.split()]
    text = "\n".join(
        [
            f"# {job_id}: submitted as by",
            shlex.join(command),
            "",
            f"# {SCRIPT_NAME}, run where the cluster starts the job",
            (bundle / SCRIPT_NAME).read_text(encoding="utf-8").rstrip(),
            "",
            "# what travels",
            *contents(bundle),
        ]
    )
    return text.replace(job_id, f"{job_id.rpartition('-')[0]}-<id>")


def hand_over(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> RayJob:
    """Hand a job to the cluster of the profile.

    Args:
        job_id: from `new_job_id`.
        runtime_env: from `ray_runtime_env`.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or it refuses the job.
    """
    address = _address(env)
    try:
        client = connect(address)
    except UserError as error:
        raise error.at(f"profile {env.profile}") from None
    except ConnectionError as error:
        raise UserError(f"profile {env.profile}: executor ray: {error}") from error
    try:
        # What travels has been chosen; a .gitignore in it must not choose again.
        with _environment(RAY_RUNTIME_ENV_IGNORE_GITIGNORE="1", RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES=""):
            client.submit_job(entrypoint=ENTRYPOINT, submission_id=job_id, runtime_env=dict(runtime_env))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"the Ray cluster at {without_login(address)} refused the job: {reason(error)}") from error
    return RayJob(job_id, address)


def how_to_follow(job: RayJob) -> str:
    """What `--batch` prints: the job's id, and Ray's own commands."""
    ray = f"ray job {{}} --address {shlex.quote(job.shown_address)} {job.id}"
    return "\n".join(
        [
            f"job {job.id}",
            f"  follow   {ray.format('logs')} --follow",
            f"  inspect  {ray.format('status')}",
            f"  cancel   {ray.format('stop')}",
        ]
    )


def is_installed() -> bool:
    """Whether Ray is here, without importing it."""
    return importlib.util.find_spec("ray") is not None


def connect(address: str) -> JobSubmissionClient:
    """Ray's client for the cluster at `address`, which answers.

    Raises:
        UserError: Ray is not installed here.
        ConnectionError: nothing answers at the address, or nothing that takes jobs.
    """
    if not is_installed():
        raise UserError("executor ray needs Ray, which is not installed", install_line("ray"))
    where = urllib.parse.urlsplit(address)
    port = where.port or (443 if where.scheme == "https" else 80)
    try:  # Ray itself would wait without end for an address that answers nothing
        socket.create_connection((where.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {without_login(address)}: {error.strerror or error}") from None
    try:
        module = importlib.import_module("ray.job_submission")
        logging.getLogger("ray").setLevel(logging.ERROR)  # after the import, which sets it
        # Ray would rather take the cluster that these name than the one it is given.
        with _environment(**{RAY_ADDRESS: None, RAY_API_SERVER: None}):
            client: JobSubmissionClient = module.JobSubmissionClient(address)
    except ImportError as error:
        raise UserError(f"executor ray: Ray does not import: {error}", install_line("ray")) from None
    except (RuntimeError, OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster takes jobs at {without_login(address)}: {reason(error)}") from error
    return client


def _address(env: Env) -> str:
    assert env.ray is not None, "the profile's executor is ray"
    return env.ray


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Inside, these variables are set, or, where None, not set."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def reason(error: object) -> str:
    """The first line that says something, without the password of an address."""
    return without_login(first_line(error))
