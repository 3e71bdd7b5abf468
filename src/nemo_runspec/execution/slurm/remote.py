"""Commands on the machine where the cluster's programs are: this one, or a login node behind SSH.

SSH is the `ssh` program itself, never asking anything (BatchMode): keys, agents, jump hosts and known host keys are
what `~/.ssh/config` says, and a host key that is not known is an error. One connection stays open for all commands of
this process, unless the user's own configuration shares connections already.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.execution.interrupts import Unreachable
from nemo_runspec.execution.local import die_with_parent
from nemo_runspec.profile import Ssh
from nemo_runspec.user_files import expanded

CONNECT_SECONDS = 15
# ssh's exit code for its own failures; the commands of this package do not use it.
_SSH_FAILED = 255
_NEVER_ASK = {"SSH_ASKPASS_REQUIRE": "never"}


@dataclass(frozen=True)
class Completed:
    """What a command left: exit code, stdout as it came, stderr as text."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """stdout as text, without the blank space around it."""
        return self.stdout.decode(errors="replace").strip()


class LocalShell:
    """This machine.

    `prefix`: what stands before a command (one quoted word) that a user types here to run it there.
    """

    prefix = ""

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60) -> Completed:
        """Run a line of shell and wait for it.

        Raises:
            Unreachable: the connection is lost, or the command does not answer within `timeout` seconds.
        """
        return _completed(["bash", "-c", command], stdin, timeout, "this machine")


class SshShell:
    """A host behind SSH. At first use, what is wrong with it is a UserError: no `ssh` program, no such host, a key or
    host key that is refused. Once it has answered, a failure is `Unreachable`, and the next command connects anew."""

    @staticmethod
    @functools.cache
    def of(ssh: Ssh) -> SshShell:
        """The one shell of this process for a login node, with its connection."""
        return SshShell(ssh)

    def __init__(self, ssh: Ssh) -> None:
        self.ssh = ssh
        self.target = f"{ssh.user}@{ssh.host}"
        self._master: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._was_connected = False

    @property
    def prefix(self) -> str:
        return shlex.join(["ssh", *self.options, self.target])

    @property
    def options(self) -> list[str]:
        """Words that say which port and key."""
        port = [] if self.ssh.port is None else ["-p", str(self.ssh.port)]
        return port + ([] if self.ssh.identity is None else ["-i", str(expanded(self.ssh.identity))])

    def run(self, command: str, stdin: bytes = b"", timeout: float = 60) -> Completed:
        self.connect()
        result = _completed([*self.words, "--", self.target, command], stdin, timeout, self.ssh.host, _NEVER_ASK)
        if result.code == _SSH_FAILED:
            self.close()
            raise self._failure(result.stderr)
        self._was_connected = True
        return result

    def connect(self) -> None:
        """Open the connection that later commands share; nothing to do where it is open."""
        if self._master is not None and self._master.poll() is None:
            return
        if not self._was_connected:
            self._check_here()
        if self._user_shares:
            return
        self.close()
        place = tempfile.gettempdir()  # the path of a socket has at most 107 bytes, and ssh adds some of its own
        self._folder = Path(tempfile.mkdtemp(prefix="runspec-ssh-", dir=place if len(place) <= 50 else "/tmp"))
        with (self._folder / "error").open("wb") as error:
            self._master = subprocess.Popen(
                [*self.words, "-N", "-o", "ControlMaster=yes", "--", self.target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=error,
                env={**os.environ, **_NEVER_ASK},
                # Ctrl-C in the terminal is for us, not for the connection.
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None,
            )
        atexit.register(self.close)
        deadline = time.monotonic() + CONNECT_SECONDS + 5
        while not self._socket.exists():
            if self._master.poll() is not None or time.monotonic() > deadline:
                stderr = (self._folder / "error").read_text(encoding="utf-8", errors="replace")
                self.close()
                raise self._failure(stderr)
            time.sleep(0.01)
        self._was_connected = True

    def close(self) -> None:
        """End the shared connection."""
        if self._master is not None:
            self._master.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._master.wait(2)
            self._master = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "s"

    @property
    def words(self) -> list[str]:
        """The `ssh` command without host and command; what rsync calls its remote shell."""
        words = ["ssh", *self.options, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
        words += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
        if self._folder is not None and not self._user_shares:
            words += ["-o", f"ControlPath={self._socket}"]
        return words

    @functools.cached_property
    def _user_shares(self) -> bool:
        """Whether the user's configuration shares connections by itself (`ControlPath`), as sites with 2FA advise."""
        settings = _completed(["ssh", *self.options, "-G", "--", self.target], b"", 10, "ssh -G").text
        return any(line.startswith("controlpath ") and not line.endswith(" none") for line in settings.splitlines())

    def _check_here(self) -> None:
        if shutil.which("ssh") is None:
            raise UserError(f"no program ssh, which {self.target} needs", "install it: apt-get install openssh-client")
        identity = self.ssh.identity
        if identity is not None and not expanded(identity).is_file():
            raise UserError(f"identity = {identity!r}: no such file", f"the key for {self.target}")

    def _failure(self, message: str) -> UserError | Unreachable:
        """What went wrong, from ssh's words: at first use an error of the user's, later a lost connection."""
        by_hand = f"try it by hand: {self.prefix}"
        if self._was_connected:
            return Unreachable(f"the connection to {self.ssh.host} was lost: {last_line(message)}", by_hand)
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in message:
            return UserError(f"{self.ssh.host}: its host key is not the one in known_hosts; nothing was sent", by_hand)
        if "Host key verification failed" in message:
            hint = f"look at the key and accept it, once: {self.prefix}"
            return UserError(f"{self.ssh.host}: its host key is not in known_hosts", hint)
        if "Permission denied" in message:
            hint = f"it needs a key and no password: ssh-agent, or identity in the profile; {by_hand}"
            return UserError(f"{self.target}: the login was refused: {last_line(message)}", hint)
        return UserError(f"cannot reach {self.target}: {last_line(message)}", by_hand)


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no answer"


def _completed(
    words: Sequence[str], stdin: bytes, timeout: float, where: str, variables: Mapping[str, str] | None = None
) -> Completed:
    try:
        process = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **(variables or {})},
            # A session of its own has no terminal to ask on, and does not get the terminal's Ctrl-C.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"no answer from {where} within {timeout:.0f} s") from None
    except OSError as error:
        raise RunFailed(f"cannot start {words[0]}: {error.strerror}") from None
    return Completed(process.returncode, process.stdout, process.stderr.decode(errors="replace"))


# Where commands run.
Shell: TypeAlias = LocalShell | SshShell


def shell_for(ssh: Ssh | None) -> Shell:
    """The shell where the cluster's programs are."""
    return LocalShell() if ssh is None else SshShell.of(ssh)
