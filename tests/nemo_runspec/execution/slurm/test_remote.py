"""Commands here and behind ssh, with a pretended `ssh` program; tests/cluster has a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.execution.interrupts import Unreachable
from nemo_runspec.execution.slurm.remote import LocalShell, SshShell
from nemo_runspec.profile import Ssh

# Its answers; `-N` is the connection that stays, whose socket appears where ControlPath says.
FAKE = """#!/bin/bash
folder=$(dirname "$0")
echo "$*" >> "$folder/calls"
for word in "$@"; do case "$word" in ControlPath=*) socket=${word#ControlPath=} ;; esac; done
if [[ "$*" == *"-G -- "* ]]; then echo "controlpath ${SHARED:-none}"; exit; fi
if [ -e "$folder/refuses" ]; then cat "$folder/refuses" >&2; exit 255; fi
if [[ "$*" == *" -N "* ]]; then touch "$socket"; exec sleep 60; fi
exec bash -c "${@: -1}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ssh").write_text(FAKE, encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text(encoding="utf-8").splitlines()


def test_here() -> None:
    done = LocalShell().run("cat; echo $((1 + 1)); echo oops >&2; exit 3", b"in\n")
    assert (done.code, done.text, done.stderr) == (3, "in\n2", "oops\n")
    with pytest.raises(Unreachable, match="no answer from this machine within 0 s"):
        LocalShell().run("sleep 5", timeout=0.1)


def test_one_connection_for_all_commands_and_nothing_is_asked(folder: Path) -> None:
    shell = SshShell(Ssh("login", "me", 2222, None))
    assert shell.run("echo one").text == "one"
    assert shell.run("cat", b"two").text == "two"
    shell.close()
    said = calls(folder)
    assert [" -N " in line for line in said] == [False, True, False, False]
    for line in said[1:]:
        assert line.startswith("-p 2222 -o BatchMode=yes ")
        assert "ControlPath=" in line
    assert said[-1].endswith(" -- me@login cat")
    assert shell.prefix == "ssh -p 2222 me@login"


def test_a_shared_connection_of_the_user_s_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARED", "/home/me/.ssh/control")
    assert SshShell(Ssh("login", "me")).run("echo one").text == "one"
    assert not any("ControlPath" in line for line in calls(folder))


@pytest.mark.parametrize("shared", ["none", "/home/me/.ssh/control"])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("Host key verification failed.", "login: its host key is not in known_hosts"),
        ("@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "is not the one in known_hosts"),
        ("me@login: Permission denied (publickey).", "me@login: the login was refused: me@login: Permission denied"),
        ("ssh: Could not resolve hostname login: Name or service not known", "cannot reach me@login: ssh: Could not"),
        ("", "cannot reach me@login: no answer"),
    ],
)
def test_a_first_connection_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shared: str, said: str, message: str
) -> None:
    monkeypatch.setenv("SHARED", shared)
    (folder / "refuses").write_text(f"{said}\n", encoding="utf-8")
    with pytest.raises(UserError) as error:
        SshShell(Ssh("login", "me")).run("true")
    assert message in error.value.message
    assert "\n" not in error.value.message
    assert "ssh me@login" in (error.value.hint or "")


def test_a_connection_that_was_there_is_lost_and_comes_back(folder: Path) -> None:
    shell = SshShell(Ssh("login", "me"))
    shell.run("true")
    (folder / "refuses").write_text("Connection closed by remote host\n", encoding="utf-8")
    for _ in range(2):
        with pytest.raises(Unreachable, match="the connection to login was lost: Connection closed"):
            shell.run("true")
    (folder / "refuses").unlink()
    assert shell.run("echo again").text == "again"
    shell.close()


def test_what_is_missing_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"identity = '/none': no such file"):
        SshShell(Ssh("login", "me", identity="/none")).run("true")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="no program ssh, which me@login needs"):
        SshShell(Ssh("login", "me")).run("true")
