"""A job for a Ray cluster that exists: the pieces that a command file puts together.

check_launch(spec, env)
runtime_env = ray_runtime_env(env, job_id, bundle, python_path, variables)
if cfg.dry_run:
    print(submission_text(env, job_id, runtime_env))
    return 0
job = submit(env, job_id, runtime_env)
return follow_ray(job)                  # or: print(how_to_follow(job)); return 0
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.env import Env
from nemo_runspec.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    Interrupted,
    RunFailed,
    UserError,
    report,
)
from nemo_runspec.execution.interrupts import CancelQuestion, noted_signals
from nemo_runspec.execution.launch_script import SCRIPT_NAME
from nemo_runspec.execution.local import exit_code
from nemo_runspec.packaging import contents
from nemo_runspec.runspec import Runspec
from nemo_runspec.secrets import looks_secret
from nemo_runspec.variables import JOB_DIR

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ENTRYPOINT = f"bash {SCRIPT_NAME}"
RAY_ADDRESS = "RAY_ADDRESS"  # where a script finds the Ray that it is to use
CONNECT_SECONDS = 10.0
# How long a cluster may not answer while a job is followed, in seconds.
PATIENCE_AWAY = 600.0
INSTALL = "install it: pip install 'nemotron[ray]'"


@dataclass(frozen=True)
class RayJob:
    """A submitted job: its id (Ray's "submission id") and the address of the cluster's dashboard."""

    id: str
    address: str


def check_launch(spec: Runspec, env: Env) -> None:
    """Refuse a script that a Ray cluster cannot start.

    Raises:
        UserError: its launch is not ray or direct.
    """
    if spec.run.launch == "torchrun":
        raise UserError(
            f'{spec.name}: launch = "torchrun" does not run on a Ray cluster, which is what profile {env.profile} is',
            "use a profile with executor slurm, or none",
        )


def new_job_id(name: str) -> str:
    """An id for a job that says what it is and that no other one has: `nano3-data-prep-sft-3f9c2a`."""
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
    """All that `submit` would send, as text, with `<id>` for what is random in the job's id. Ray is not imported."""
    bundle = Path(str(runtime_env["working_dir"]))
    others = {key: value for key, value in runtime_env.items() if key != "working_dir"}
    command = ["ray", "job", "submit", "--address", _address(env), "--submission-id", job_id]
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


def submit(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> RayJob:
    """Hand a job to the cluster of the profile.

    Args:
        job_id: from `new_job_id`.
        runtime_env: from `ray_runtime_env`.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or it refuses the job.
    """
    address = _address(env)
    client = _client(address, profile=env.profile)
    try:
        # What travels has been chosen; a .gitignore in it must not choose again.
        with _environment(RAY_RUNTIME_ENV_IGNORE_GITIGNORE="1", RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES=""):
            client.submit_job(entrypoint=ENTRYPOINT, submission_id=job_id, runtime_env=dict(runtime_env))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"the Ray cluster at {address} refused the job: {_reason(error)}") from error
    return RayJob(job_id, address)


def how_to_follow(job: RayJob) -> str:
    """What `--batch` prints: the job's id, and Ray's own commands."""
    ray = f"ray job {{}} --address {shlex.quote(job.address)} {job.id}"
    return "\n".join(
        [
            f"job {job.id}",
            f"  follow   {ray.format('logs')} --follow",
            f"  inspect  {ray.format('status')}",
            f"  cancel   {ray.format('stop')}",
        ]
    )


def follow_ray(job: RayJob) -> int:
    """Follow a job to its end: its log goes to stdout, what Ray does with it to stderr.

    Ctrl-C asks once whether to cancel, and a second one cancels; without a terminal to ask on, the first says what a
    second one does. SIGTERM leaves the job running.

    Returns:
        0 succeeded; the script's own 1, 2, 130 or 143; 1 for whatever else it ended with; 130 cancelled by Ctrl-C; 143
        after SIGTERM.
    """
    question = CancelQuestion()
    with noted_signals() as signals:
        follower = _Follower(job, signals)
        while True:
            try:
                code = follower.run()
            except _Away as error:
                report(RunFailed(f"{error}; job {job.id} not cancelled", how_to_follow(job)))
                return FAILED
            if code is not None:
                return code
            if signal.SIGTERM in signals:
                say(f"stopped by SIGTERM; job {job.id} not cancelled\n{how_to_follow(job)}")
                return PREEMPTED
            signals.pop(0)
            if question.ask(f"job {job.id}"):
                return follower.cancel()


class _Away(Exception):
    """The cluster does not answer."""


class _Follower:
    """Where following has got to; goes on there after a question."""

    def __init__(self, job: RayJob, signals: list[int]) -> None:
        self.job, self.signals = job, signals
        self.client = _client(job.address)
        self.printed = 0  # characters of the log
        self.shown = ""
        self.last_answer = time.monotonic()

    def run(self) -> int | None:
        """Follow the job to its end, and return its exit code; None as soon as a signal has been noted."""
        while not self.signals:
            try:
                details = self.client.get_job_info(self.job.id)
                self.last_answer = time.monotonic()
                self._show(details.status)
                if details.status.is_terminal():
                    self._rest_of_log()
                    return self._report(details)
                if details.status != "PENDING":
                    asyncio.run(self._stream())
            except (RuntimeError, OSError) as error:  # requests' errors are OSErrors, aiohttp's one or the other
                if time.monotonic() - self.last_answer > PATIENCE_AWAY:
                    raise _Away(f"the Ray cluster at {self.job.address} does not answer: {_reason(error)}") from error
            time.sleep(0.3)
        return None

    def cancel(self) -> int:
        """Ask Ray to stop the job, and follow it to its end: Ray sends SIGTERM and, some seconds later, SIGKILL."""
        self.client.stop_job(self.job.id)
        say(f"cancelling job {self.job.id}")
        while not (status := self.client.get_job_status(self.job.id)).is_terminal() and not self.signals:
            time.sleep(0.3)
        self._rest_of_log()
        self._show(status)
        report(Interrupted(f"job {self.job.id} cancelled"))
        return INTERRUPTED

    async def _stream(self) -> None:
        """Print the log as it grows, until the job has ended, the connection breaks, or a signal has been noted."""
        skip = self.printed  # the stream begins at the beginning
        stream = self.client.tail_job_logs(self.job.id)
        piece = asyncio.ensure_future(anext(stream))
        while not self.signals:
            done, _ = await asyncio.wait({piece}, timeout=0.2)
            if not done:
                continue
            try:
                text = piece.result()
            except StopAsyncIteration:
                return
            new, skip = text[skip:], max(0, skip - len(text))
            self._print(new)
            self.last_answer = time.monotonic()
            piece = asyncio.ensure_future(anext(stream))
        piece.cancel()

    def _rest_of_log(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the log of a job that never began
            self._print(self.client.get_job_logs(self.job.id)[self.printed :])

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self.printed += len(text)

    def _show(self, status: str) -> None:
        word = str(getattr(status, "value", status)).lower()
        if word != self.shown:
            self.shown = word
            say(f"job {self.job.id} {word}")

    def _report(self, details: Any) -> int:
        """Say how the job ended, and return its exit code."""
        if details.status == "SUCCEEDED":
            return DONE
        hint = f"log: ray job logs --address {shlex.quote(self.job.address)} {self.job.id}"
        if details.status == "STOPPED":
            report(RunFailed(f"job {self.job.id} was stopped by somebody else", hint))
            return FAILED
        if details.driver_exit_code is None:  # it never ran
            report(RunFailed(f"job {self.job.id} failed: {_reason(details.message)}", hint))
            return FAILED
        code = exit_code(details.driver_exit_code)
        report(RunFailed(f"job {self.job.id} failed with exit code {details.driver_exit_code}", hint))
        return code


def _client(address: str, *, profile: str | None = None) -> JobSubmissionClient:
    whose = "executor ray" if profile is None else f"profile {profile}: executor ray"
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{whose} needs Ray, which is not installed", INSTALL)
    where = urllib.parse.urlsplit(address)
    port = where.port or (443 if where.scheme == "https" else 80)
    try:  # Ray itself would wait without end for an address that answers nothing
        socket.create_connection((where.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"{whose}: nothing answers at {address}: {error.strerror or error}") from None
    try:
        module = importlib.import_module("ray.job_submission")
        logging.getLogger("ray").setLevel(logging.ERROR)  # after the import, which sets it
        # Ray would rather take the cluster that these name than the one it is given.
        with _environment(RAY_ADDRESS=None, RAY_API_SERVER_ADDRESS=None):
            client: JobSubmissionClient = module.JobSubmissionClient(address)
    except ImportError as error:
        raise UserError(f"{whose}: Ray does not import: {error}", INSTALL) from None
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{whose}: no Ray cluster takes jobs at {address}: {_reason(error)}") from error
    return client


def _address(env: Env) -> str:
    assert env.ray is not None, "the profile's executor is ray"
    return env.ray.address


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


def _reason(error: object) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
