"""A login node: an sshd on loopback whose sessions see the cluster of slurm.py, and nothing of ours.

Its keys, its authorized_keys, its known_hosts and the home folder of its sessions lie under one folder; the machine's
`/etc/ssh` and anybody's `~/.ssh` are neither read nor written. Needs root, as sshd does for a session of root's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .slurm import SBIN, Daemons, free_ports, write_private

CLIENT_OPTIONS = ("BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", "LogLevel=ERROR")


@dataclass
class LoginNode:
    """Where to log in and with what. `host` is 127.0.0.1; the only way in is `identity`."""

    root: Path
    host: str
    port: int
    user: str
    identity: Path
    known_hosts: Path
    home: Path
    daemons: Daemons

    @property
    def client_config(self) -> Path:
        """A file for `ssh -F`: port, user, key and known_hosts for the host `login` and for 127.0.0.1."""
        return self.root / "ssh_config"

    @property
    def client_home(self) -> Path:
        """A HOME whose `.ssh` holds identity, known_hosts and config: for programs that take `~` from HOME."""
        return self.root / "client"

    @property
    def bin(self) -> Path:
        """A folder for the front of PATH: its `ssh` is `ssh -F client_config`, as the real one's `~` is not HOME."""
        return self.root / "bin"

    @property
    def profile(self) -> dict[str, object]:
        """The keys of a profile of env.toml that submits here, all but `job_dir`."""
        keys = {"host": self.host, "port": self.port, "user": self.user, "identity": str(self.identity)}
        return {"tunnel": "ssh", **keys}

    @property
    def env(self) -> dict[str, str]:
        """For a subprocess that logs in (with rsync, say), beside the rest of its environment: HOME and PATH."""
        return {"HOME": str(self.client_home), "PATH": f"{self.bin}:{os.environ.get('PATH', SBIN)}"}

    def ssh(self, command: str) -> str:
        """What a shell command prints on the login node. Raises subprocess.CalledProcessError."""
        words = ["ssh", "-F", str(self.client_config), "login", command]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout

    def stop(self) -> None:
        self.daemons.stop()


def start(root: Path, environment: dict[str, str], user: str = "root") -> LoginNode:
    """Start sshd. `environment` is what its sessions see besides HOME, PATH, SHELL and USER; no quotes in values."""
    client = root / "client" / ".ssh"
    home = root / "home"
    for folder in (root / "logs", client, home):
        folder.mkdir(parents=True)
    client.chmod(0o700)
    identity, host_key, known_hosts = client / "id_ed25519", root / "host_key", client / "known_hosts"
    for path in (identity, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", path], check=True)
    authorized = root / "authorized_keys"
    write_private(authorized, identity.with_suffix(".pub").read_text())
    port = free_ports(1)[0]
    host_public = " ".join(host_key.with_suffix(".pub").read_text().split()[:2])
    write_private(known_hosts, f"[127.0.0.1]:{port} {host_public}\n")
    options = "".join(f"    {option.replace('=', ' ')}\n" for option in CLIENT_OPTIONS)
    for path in (root / "ssh_config", client / "config"):
        write_private(path, (
            f"Host login 127.0.0.1\n    HostName 127.0.0.1\n    Port {port}\n    User {user}\n"
            f"    IdentityFile {identity}\n    UserKnownHostsFile {known_hosts}\n    GlobalKnownHostsFile none\n"
            f"{options}"
        ))  # fmt: skip
    node_bin = root / "bin"
    node_bin.mkdir()
    program = shutil.which("ssh", path=SBIN)
    (node_bin / "ssh").write_text(f'#!/bin/sh\nexec {program} -F {shlex.quote(str(root / "ssh_config"))} "$@"\n')
    (node_bin / "ssh").chmod(0o755)
    seen = {"HOME": str(home), "PATH": SBIN, "LANG": "C.UTF-8"} | environment
    set_env = " ".join(f'"{key}={value}"' for key, value in seen.items())
    write_private(
        root / "sshd_config",
        f"""\
ListenAddress 127.0.0.1
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowUsers {user}
PrintMotd no
PrintLastLog no
MaxSessions 50
MaxStartups 50
Subsystem sftp internal-sftp
SetEnv {set_env}
""",
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd chroots its unprivileged child, compiled in
    node = LoginNode(root, "127.0.0.1", port, user, identity, known_hosts, home, Daemons(root / "logs"))
    try:
        # Its own environment is empty, so that nothing of the tests' reaches a session.
        node.daemons.start("sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", root / "sshd_config"], {"PATH": SBIN})
        node.daemons.listens("sshd", port)
    except BaseException:
        node.stop()
        raise
    return node
