"""Run a job on this machine: one process, or several under torchrun; signals go in, exit codes come out.

The child gets /dev/null as stdin (a launched script takes its inputs from its config, not from a pipe) and settings
without which small models train at half speed on a CPU (`CPU_SETTINGS`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.cpus import usable_cpus
from nemo_runspec.errors import (
    DONE,
    EXIT_CODE_FILE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    REFUSED,
    RunFailed,
    leaving_signals,
    report,
    say_in_handler,
)
from nemo_runspec.execution.interrupts import handling
from nemo_runspec.gpus import visible_gpus
from nemo_runspec.runspec import Runspec
from nemo_runspec.variables import ARTIFACTS_ROOT, JOB_DIR, NODE_RANK, OF_ONE_JOB, OF_ONE_NODE, RESTARTS
from nemo_runspec.words import shown

# Ctrl-C this many times ends a child that does not listen.
PATIENCE = 3
_TORCHRUN = ("-m", "nemo_runspec.execution.torchrun")
_FT_LAUNCHER = ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher")
_PR_SET_PDEATHSIG = 1


def local_processes(spec: Runspec, processes: int | None) -> int:
    """How many processes of a script run here: under torchrun one a visible GPU, and without any `run.processes`."""
    return (visible_gpus() or processes or 1) if spec.run.launch == "torchrun" else 1


def local_command(spec: Runspec, config: Path, processes: int = 1) -> list[str]:
    """The words that `execute_local` would run: torchrun with a process a visible GPU; one process needs no torchrun.

    A script with `launch = "ray"` is run plainly: it works in processes of this machine, or on the Ray of RAY_ADDRESS.

    Args:
        config: the job's config file.
        processes: how many torchrun starts where no GPU is visible: the config's `run.processes`.
    """
    words = script_words(spec.run.cmd, spec.script_path, config)
    count = local_processes(spec, processes)
    if count > 1:
        # By its host name a machine may not find itself (a laptop without a network): minutes, then an error.
        here = ("--standalone", "--local-addr=127.0.0.1")
        return under_torchrun(words, *here, f"--nproc-per-node={count}")
    return words


def cpu_settings(processes: int) -> dict[str, str]:
    """Variables of a job that computes on this machine's CPU: `CPU_SETTINGS`, and an even share of its cores."""
    if visible_gpus() or processes == 1:
        return CPU_SETTINGS
    return {**CPU_SETTINGS, "OMP_NUM_THREADS": str(max(1, usable_cpus() // processes))}


def script_words(cmd: str, script: Path, config: Path) -> list[str]:
    """The words of a runspec's `cmd`; its python is the one that runs this."""
    words = [word.format(script=script, config=config) for word in shlex.split(cmd)]
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    return words


def under_torchrun(words: Sequence[str], *options: str) -> list[str]:
    """The command that starts `words` (python, script, arguments) as the workers of torchrun."""
    return [words[0], *_TORCHRUN, *options, *words[1:]]


def under_ft_launcher(words: Sequence[str], *options: str) -> list[str]:
    """The same under NVRx's launcher, which ends workers that hang, and starts all again where one fails."""
    return [words[0], *_FT_LAUNCHER, *options, *words[1:]]


# Small models make thousands of short parallel regions a second; benchmarks/cpu_settings.py prints what each is worth.
CPU_SETTINGS = {
    # Idle OpenMP workers sleep: with other work on the cores, ones that spin made a step ten times slower ...
    "OMP_WAIT_POLICY": "PASSIVE",
    # ... but not before a few microseconds, or waking them costs as much as they bring (GNU OpenMP, iterations).
    "GOMP_SPINCOUNT": "5000",
    # glibc: keep freed memory. By default each large tensor is mapped, zeroed page by page and unmapped, every step.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}


def local_environment(env_vars: Mapping[str, str], processes: int = 1) -> dict[str, str]:
    """This process's environment with `env_vars` over it, and `cpu_settings` for what nobody has set."""
    return {**cpu_settings(processes), **os.environ, **env_vars}


def execute_local(
    spec: Runspec,
    job_dir: Path,
    env_vars: Mapping[str, str],
    signals: list[int] | None = None,
) -> int:
    """Run the script of `spec` with the config in `job_dir`, and wait for it.

    Args:
        job_dir: holds train.yaml (train.json for `format = "json"`).
        env_vars: set for the child, over this process's environment.
        signals: is given the numbers of those that were passed on: a script in its last moments still ends with 0.

    Returns:
        0 done, 1 failed, 2 refused, 130 interrupted, 143 checkpoint saved on a signal.

    Raises:
        RunFailed: the script ended well and did not publish what its config names.
    """
    processes = _processes(job_dir / spec.job_config_name) if spec.run.launch == "torchrun" else 1
    command = local_command(spec, job_dir / spec.job_config_name, processes)
    environment = local_environment(env_vars, processes)
    for name in (JOB_DIR, *OF_ONE_JOB, *OF_ONE_NODE):  # started within a job, this run is still none of its parts
        if name not in env_vars:
            environment.pop(name, None)
    outputs, fingerprint = _promised(job_dir)
    before = {name: Registry(environment[ARTIFACTS_ROOT]).versions(name) for name in outputs}
    with tempfile.TemporaryDirectory(prefix="runspec-") as folder:
        code = run_command(command, environment, spec.run.workdir, Path(folder) / "exit_code", signals)
    for name in outputs if code == DONE else ():
        registry = Registry(environment[ARTIFACTS_ROOT])
        # A run that goes on after it has published makes no further version.
        if registry.versions(name) == before[name] and not (fingerprint and registry.find_published(name, fingerprint)):
            raise RunFailed(
                f"{shown(spec.script_path)} ended well but did not publish {name}, which its config names",
                f"its records: {job_dir}; how to publish: docs/runspec/v1/spec.md, Publishing",
            )
    return code


def _processes(config: Path) -> int:
    """`run.processes` of a job's config, which is YAML or JSON; 1 where it has none."""
    run: dict[str, Any] = read_yaml(config.read_text(encoding="utf-8"), str(config))[0].get("run") or {}
    return run.get("processes") or 1


def _promised(job_dir: Path) -> tuple[list[str], str | None]:
    """Names of the artifacts that the job in `job_dir` is to publish, and its fingerprint, by its record."""
    record = job_dir / "job.yaml"
    if not record.is_file():
        return [], None
    job = read_yaml(record.read_text(encoding="utf-8"), str(record))[0]
    return list(job["outputs"]), job["fingerprint"]


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    workdir: Path | None,
    left: Path,
    signals: list[int] | None = None,
    *,
    all_are_signalled: bool = False,
) -> int:
    """Run `command`, pass signals on to it, and wait for it.

    Args:
        environment: the whole environment of the child.
        left: a file that does not exist yet, for the exit code of rank 0: torchrun ends as the process that ended
            first, whichever that is.
        signals: see `execute_local`.
        all_are_signalled: who stops or warns the job signals every process of it, as Slurm does, and not only this one.

    Returns:
        0 done, 1 failed, 2 refused, 130 interrupted, 143 checkpoint saved on a signal.
    """
    launcher = tuple(command[1:3])
    torchrun = launcher in (_TORCHRUN, _FT_LAUNCHER)
    if torchrun:
        restarts = {RESTARTS: "1"} if any(word.startswith("--max-restarts") for word in command) else {}
        environment = {**environment, **restarts, EXIT_CODE_FILE: str(left)}
    forward = _Forward(torchrun, torchrun and all_are_signalled, [] if signals is None else signals)
    code = _wait(command, environment, workdir, forward)
    of_rank_0 = code_in(left)
    if of_rank_0 is None:
        return exit_code(code)
    if code == DONE:  # as one that has saved ends, too, where workers are started again
        return PREEMPTED if of_rank_0 == PREEMPTED else DONE
    # Where nobody has asked the job to leave, another process failed or was killed: after rank 0 was done, or on this
    # node, where torchrun then stops rank 0, which takes that for a wish. Of ft_launcher every exit code is 1.
    stopped = of_rank_0 == PREEMPTED and launcher == _TORCHRUN
    here = environment.get(NODE_RANK, "0") == "0"
    if not forward.received and (of_rank_0 == DONE or (here and (stopped or code < DONE))):
        return exit_code(code)
    return exit_code(of_rank_0)


def code_in(file: Path) -> int | None:
    """The exit code that a process has left in `file`; None where it could not: it was killed, or the disk is full."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text(encoding="utf-8"))
    return None


def exit_code(returncode: int) -> int:
    """The exit code of a command whose child ended with `returncode` (negative: the signal that killed it).

    A killed child has saved nothing, so it counts as failed; only a script that says 143 itself has its checkpoint.
    """
    if returncode in (DONE, FAILED, REFUSED, INTERRUPTED, PREEMPTED):
        return returncode
    if returncode == -signal.SIGINT:
        return INTERRUPTED
    if returncode < 0:
        known = -returncode in set(signal.Signals)  # real-time signals but the first and the last have no name
        name = signal.Signals(-returncode).name if known else f"signal {-returncode}"
        hint = "out of memory, perhaps; the same command goes on from the last checkpoint"
        report(RunFailed(f"the job was killed by {name}", hint if returncode == -signal.SIGKILL else None))
    return FAILED


def _wait(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None, forward: _Forward) -> int:
    """Start the child, pass signals on to it until it ends, and return its return code."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Handlers belong to the main thread; elsewhere the caller keeps its own.
    signals = (signal.SIGINT, *leaving_signals()) if threading.current_thread() is threading.main_thread() else ()
    with handling(signals, forward):
        try:
            child = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                # A group of its own: Ctrl-C reaches the child once, through us, not twice.
                start_new_session=True,
                preexec_fn=functools.partial(_before_child, forward.shielded) if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise RunFailed(f"cannot start {command[0]}: {error.strerror}") from None
        forward.to(child)
        code = child.wait()
    return PREEMPTED if forward.ended_it else code


def _before_child(shielded: bool) -> None:
    """In the child, before its program.

    A child that outlived its parent's `kill -9` would be in the way of the same command, started again to resume.
    torchrun dies of SIGUSR1, and of SIGTERM it kills its workers after 30 s, which may still be writing a checkpoint.
    """
    die_with_parent()
    if shielded:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """For a child, before its program: get signal `number` when the parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class _Forward:
    """Signals received so far, and the child to pass them to; those that came before it started are kept for it."""

    def __init__(self, torchrun: bool, shielded: bool, received: list[int]) -> None:
        self.torchrun, self.shielded = torchrun, shielded
        self.ended_it = False
        self.child: subprocess.Popen[bytes] | None = None
        self.received = received
        self.kept: list[int] = []
        self.interrupts = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        say_in_handler(number, "")
        self.received.append(number)
        if self.child is None:
            self.kept.append(number)
        else:
            self.send(self.child, number)

    def to(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        for number in self.kept:
            self.send(child, number)

    def send(self, child: subprocess.Popen[bytes], number: int) -> None:
        self.interrupts += number == signal.SIGINT
        if self.interrupts >= PATIENCE:
            number = signal.SIGKILL
        # torchrun would give its workers 30 s to save, and die of SIGUSR1: they get the signal themselves.
        workers = children(child.pid) if self.torchrun else []
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not workers and self.shielded:
            # Not started yet, so there is nothing to save; or all done, and rank 0 has left its exit code.
            self.ended_it, number = True, signal.SIGKILL
        if not workers or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM if self.torchrun and number == signal.SIGUSR1 else number)


def children(pid: int) -> list[int]:
    """The child processes of `pid`; none where the system does not say (no Linux)."""
    pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # ended meanwhile
            pids += [int(word) for word in file.read_text(encoding="ascii").split()]
    return pids
