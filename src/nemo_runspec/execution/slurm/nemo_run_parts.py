"""The parts that NeMo-Run is given: where its commands run, and the code that it packs. Imports nemo_run.

NeMo-Run's own SSH tunnel accepts every host key and asks for passwords; its own local one reads this process's stdin.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemo_run as run
from invoke.runners import Result

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.execution.slurm.remote import Completed, SshShell, shell_for
from nemo_runspec.profile import Ssh

# Reads NAME=value pairs that end in a zero byte from stdin, exports them, and becomes the command that follows.
_WITH_VARIABLES = 'while IFS= read -r -d "" pair; do export "$pair"; done; exec "$@"'


@dataclass(kw_only=True)
class BundlePackager(run.Packager):
    """Hands over a bundle, a folder, as the job's `code/`."""

    bundle: str = ""

    def package(self, path: Path, job_dir: str, name: str) -> str:
        """Copy the bundle. NeMo-Run unpacks an archive of this name; there is none."""
        shutil.copytree(self.bundle, Path(job_dir) / "code", dirs_exist_ok=True)
        return ""


@dataclass(kw_only=True)
class LocalTunnel(run.LocalTunnel):
    """sbatch on this machine; the job inherits this process's environment, secrets among it."""

    def run(self, command: str, hide: bool = True, warn: bool = False, **kwargs: Any) -> Result:
        return _result(command, shell_for(None).run(command), warn)


@dataclass(kw_only=True)
class SSHTunnel(run.SSHTunnel):
    """sbatch on a login node.

    The values of `secrets`, names of variables of this process, go to sbatch over ssh's stdin: they are in no command
    line and in no file.
    """

    secrets: list[str] = field(default_factory=list)

    @property
    def login(self) -> SshShell:
        """The login node."""
        return SshShell.of(Ssh(self.host, self.user, self.port, self.identity))

    def connect(self) -> None:
        """Check what copying and submitting need, and make the object that NeMo-Run's rsync works with.

        Raises:
            UserError: rsync is missing here or there, or sbatch there.
        """
        if shutil.which("rsync") is None:
            raise UserError("no program rsync, which submitting over ssh needs", "install it: apt-get install rsync")
        for program in ("sbatch", "rsync"):
            if self.login.run(f"command -v {program}").code != 0:
                raise UserError(f"{self.host} has no program {program}", f"as a plain ssh login to {self.key} sees it")
        self.session = SimpleNamespace(
            host=self.host,
            user=self.user,
            port=self.port or 22,
            connect_kwargs={},
            is_connected=True,
            run=self.run,
            local=self._copy,
        )

    def run(self, command: str, hide: bool = True, warn: bool = False, **kwargs: Any) -> Result:
        stdin = b""
        if command.startswith("sbatch ") and self.secrets:
            stdin = b"".join(f"{name}={os.environ[name]}\0".encode() for name in self.secrets)
            command = f"bash -c {shlex.quote(_WITH_VARIABLES)} bash {command}"
        return _result(command, self.login.run(command, stdin), warn)

    def cleanup(self) -> None:
        """The connection is that of the process: following the job goes on with it."""

    def _copy(self, rsync: str, hide: bool = True) -> Result:
        """Run NeMo-Run's rsync command over the connection that is open already."""
        remote_shell = f"--rsh={shlex.join(self.login.words)}"
        words = [remote_shell if word.startswith("--rsh=") else word for word in shlex.split(rsync)]
        command = shlex.join(words)
        return _result(command, shell_for(None).run(command, timeout=3600), warn=False)


def _result(command: str, completed: Completed, warn: bool) -> Result:
    if completed.code != 0 and not warn:
        raise _failure(command, completed)
    # What a site's own plugins print stands before the job id.
    stdout = completed.text.splitlines()[-1:] if "sbatch " in command else [completed.text]
    return Result(stdout="".join(stdout), stderr=completed.stderr, exited=completed.code, command=command)


def _failure(command: str, completed: Completed) -> UserError | RunFailed:
    lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
    lines = lines or [f"exit code {completed.code}"]
    if "sbatch " in command:
        reasons = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines if "sbatch:" in line]
        return UserError(f"sbatch refused the job: {'; '.join(reasons or lines[-1:])}", "nothing was submitted")
    if command.startswith("mkdir "):
        return UserError(f"job_dir: cannot be made: {lines[-1].removeprefix('mkdir: ')}", "nothing was submitted")
    program = command.split(maxsplit=1)[0]
    return RunFailed(f"{program} failed: {lines[-1]}", f"the command was: {command}")
