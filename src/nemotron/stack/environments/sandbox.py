"""Run a program that a model wrote, so that it can reach nothing and take no more than its limits.

Two tiers. `bubblewrap`: no network, no file and no variable of the caller's, a read-only system, processes, memory and
time limited; it needs Linux and the package `bubblewrap`. `subprocess`: the limits alone, without that of processes.
The second is for machines without the first and for programs that are trusted, and is taken only where a config names
it.

One start of the sandbox runs all tests of a program. It brings back what the program returned or printed and nothing
else: expected outputs stay outside, so there is no checker to patch and no verdict to forge.

What lies in memory and in no process's address space is refused by a filter of system calls: shared memory, queues and
semaphores of System V, and file systems that a program mounts in a user namespace of its own. Files in memory have the
size of an output, and a process has 64 of them; /tmp has 16 MiB.

Simplified: what a machine with cgroups could limit for a program as a whole is limited for each of its processes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import platform
import secrets
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nemo_runspec.cpus import usable_cpus
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import sandbox_driver

# A sandbox that has not started by then is broken, or the machine is; a start takes some 20 ms.
_START_SECONDS = 30.0
# Sets of texts have one order: else a program that goes by it passes in one run and fails in the next.
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
_GRACE_SECONDS = 5.0
_TMP_BYTES = 16 << 20
_OUTPUTS_BYTES = 32 << 20  # of all tests of a program together
# Machine -> its number in linux/audit.h, and those of shmget, msgget, semget, mount and fsopen. Memory that they take
# belongs to no process, so that no limit of one counts it.
_REFUSED_CALLS = {
    "x86_64": (0xC000003E, (29, 68, 64, 165, 430)),
    "aarch64": (0xC00000B7, (194, 186, 190, 40, 430)),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may take in each of its tests.

    wall_seconds: four times the processor time, for what shares its processor with others; whatever waits or sleeps
    longer fails. memory_bytes: address space of each process. processes: at once, the sandbox's own two or three
    included.
    """

    wall_seconds: float = 8.0
    cpu_seconds: int = 2
    memory_bytes: int = 512 << 20
    processes: int = 8
    output_bytes: int = 1 << 20


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """outputs: of the tests that ran to their end, in order. failure: why the next one did not; empty if all did."""

    outputs: list[str]
    failure: str


class SandboxError(Exception):
    """The sandbox did not start, so nothing is known about the program."""


def run_program(
    program: str,
    inputs: Sequence[str],
    fn_name: str | None = None,
    *,
    sandbox: Sandbox = "bubblewrap",
    prelude: bool = False,
    limits: Limits = LIMITS,
) -> ProgramRun:
    """Run a program once for each of `inputs`, each time in a new process, until one run fails.

    Args:
        inputs: what the program reads from stdin; with `fn_name`, the arguments, a line of JSON each.
        fn_name: the function, or method of `class Solution`, that is called; its result comes back as JSON. None: what
            the program prints comes back.
        prelude: the names of the modules that LiveCodeBench's solutions take for granted are there.

    Raises:
        SandboxError: the sandbox did not start. Whatever goes wrong later is the program's failure.
    """
    job = {"program": program, "inputs": list(inputs), "fn_name": fn_name, "prelude": prelude}
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(job).encode())
        stdin.seek(0)
        with _started(sandbox, limits, stdin, stderr) as process:
            assert process.stdout is not None
            # The driver keeps the time of each test. A program may stop the driver.
            lines = _lines(process.stdout, limits.wall_seconds + _GRACE_SECONDS)
            if next(lines, "") != "ready":
                stderr.seek(0)
                said = stderr.read(4096).decode(errors="replace").strip().splitlines()
                raise SandboxError(said[-1] if said else f"no answer in {_START_SECONDS:.0f} s")
            outputs: list[str] = []
            for line in lines:  # what comes from here on may be the program's own, and may be anything
                result = _object(line)
                if not isinstance(result.get("output"), str):
                    return ProgramRun(outputs, str(result.get("failure", "killed what ran it")))
                outputs.append(result["output"])
                if len(outputs) == len(inputs):
                    return ProgramRun(outputs, "")
    return ProgramRun(outputs, "ended early, wrote too much, or stopped what ran it")


def program_slots() -> int:
    """How many programs a process should run side by side: as many as it has processors, which it shares with the other
    ranks on its machine."""
    return max(1, usable_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@functools.cache
def check_sandbox(sandbox: Sandbox) -> None:
    """UserError, with what to do about it, where programs cannot be run in this tier on this machine."""
    install = "apt-get install bubblewrap"
    if sandbox == "bubblewrap" and shutil.which("bwrap") is None:
        raise UserError("code generation runs programs under bubblewrap, which is not installed", install)
    try:
        run = run_program("print(input())", ["1"], sandbox=sandbox)
    except SandboxError as failure:
        raise UserError(
            f"the sandbox {sandbox} does not start: {failure}",
            f"`{install}`; it needs Linux that lets you make user namespaces, or root",
        ) from None
    if run.outputs != ["1\n"]:
        raise UserError(f"the sandbox {sandbox} does not run Python: {run.failure}")


def sandbox_failure(sandbox: Sandbox) -> str:
    """The message and the hint of `check_sandbox` on this machine, a line each; empty where programs can be run."""
    try:
        check_sandbox(sandbox)
    except UserError as failure:
        return str(failure)
    return ""


@contextlib.contextmanager
def _started(
    sandbox: Sandbox, limits: Limits, stdin: IO[bytes], stderr: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The driver, waiting for its job or at it; when the block ends, it and what it started are killed."""
    rlimits = {"AS": limits.memory_bytes, "NOFILE": 64, "CORE": 0}
    uid = None
    if sandbox == "bubblewrap":
        rlimits["NPROC"] = limits.processes
        if os.geteuid() == 0:
            # Linux counts processes of a user, and none of root's: a number that no user has, for this run alone.
            uid = 1_000_000_000 + secrets.randbelow(1_000_000_000)
    of_a_test = ("wall_seconds", "cpu_seconds", "output_bytes")
    settings = json.dumps({"uid": uid, "rlimits": rlimits, **{name: getattr(limits, name) for name in of_a_test}})
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as seccomp:
        bubblewrap: tuple[str, ...] = ()
        if sandbox == "bubblewrap":
            seccomp.write(_seccomp_filter())
            seccomp.seek(0)
            bubblewrap = (*_bubblewrap(), "--seccomp", str(seccomp.fileno()))
        process = subprocess.Popen(
            [*bubblewrap, *_python(), "-c", _driver(), settings], pass_fds=[seccomp.fileno()] if bubblewrap else [],
            stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=_ENVIRONMENT, cwd=folder, start_new_session=True,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # bubblewrap's other processes die with it


def _python() -> list[str]:
    """The interpreter, without the packages of this environment or the user's: -I -S, but for `_ENVIRONMENT`."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [str(Path(sys.base_prefix) / "bin" / f"python{version}"), "-P", "-s", "-S"]


@functools.cache
def _driver() -> str:
    return inspect.getsource(sandbox_driver)


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """The command line up to the program: a system of /usr and the interpreter, read-only, and an empty /tmp."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    rights = ["--cap-drop", "ALL"]
    if os.geteuid() == 0:
        # As root itself, which can read the interpreter wherever it lies; the driver becomes another user first of all.
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        namespaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("/lib", "/lib64", "/lib32", "/bin"):
        path = Path(name)
        if path.is_symlink():
            system += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            system += ["--ro-bind", name, name]
    system += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr":
        for parent in [*reversed(Path(sys.base_prefix).parents)][1:]:  # which bubblewrap would make for root alone
            system += ["--perms", "0755", "--dir", str(parent)]
        system += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    return (
        bwrap, "--die-with-parent", "--new-session", *namespaces, *rights, *system,
        "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
        "--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp",
    )  # fmt: skip


@functools.cache
def _seccomp_filter() -> bytes:
    """The program, for the kernel's BPF, by which the calls of `_REFUSED_CALLS` end with EPERM; so do all of another
    machine's (of i386 on x86-64, say), whose numbers are others."""
    if platform.machine() not in _REFUSED_CALLS:
        raise SandboxError(f"no filter of system calls for {platform.machine()}")
    machine, calls = _REFUSED_CALLS[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    # (what, instructions to skip if it holds, and if not, value). struct seccomp_data: the call's number, the machine.
    program = [(load, 0, 0, 4), (equal, 0, len(calls) + 3, machine), (load, 0, 0, 0)]
    program += [(at_least, len(calls) + 1, 0, 1 << 30)]  # the x32 calls of x86-64
    program += [(equal, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _lines(stdout: IO[bytes], seconds: float) -> Iterator[str]:
    """Lines as they come, until the end, a line that takes too long, or more output than is taken.

    The first has `_START_SECONDS`, each of the others `seconds`.
    """
    deadline, size, rest = time.monotonic() + _START_SECONDS, 0, list[bytes]()  # of the line that has not ended
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and size <= _OUTPUTS_BYTES and selector.select(left):
            block = os.read(stdout.fileno(), 1 << 16)
            if not block:
                return
            size += len(block)
            *complete, left_over = block.split(b"\n")
            for end in complete:
                line, rest = b"".join([*rest, end]), []
                deadline = time.monotonic() + seconds
                yield line.decode(errors="replace")
            rest.append(left_over)


def _object(line: str) -> dict[str, Any]:
    """A JSON object; an empty one where the line holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
