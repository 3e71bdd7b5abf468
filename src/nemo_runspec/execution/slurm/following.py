"""Stay attached to jobs in Slurm: print their logs and states, pass Ctrl-C on, and end with the job's own exit code.

Log lines go to stdout, what Slurm does to stderr. The state comes from `scontrol show job`, which is right at once;
from the accounting (`sacct`) where the controller has forgotten the job, some minutes after its end.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemo_runspec.errors import DONE, FAILED, INTERRUPTED, PREEMPTED, REFUSED, Interrupted, RunFailed, report
from nemo_runspec.execution.interrupts import Patience, SignalNoted, Unreachable, attend, say
from nemo_runspec.execution.slurm.submit import SlurmJob, how_to_follow, submitted_jobs
from nemo_runspec.profile import Env
from nemo_runspec.words import plural

if TYPE_CHECKING:
    from nemo_run import Experiment

# Slurm's states of a job that is over (squeue(1), JOB STATE CODES). In all others it has something before it.
FINISHED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
)  # fmt: skip
# How long a finished job may stay unknown to the accounting, in seconds.
PATIENCE_UNKNOWN = 60.0
_READ_AT_MOST = 4_000_000
_MARK = b"\n--runspec--\n"


@dataclass(frozen=True)
class State:
    """What Slurm says about a job: its word for the state, why it waits, where it runs, how often it was restarted, and
    the exit code of its batch script."""

    name: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: int = 0

    @property
    def finished(self) -> bool:
        return self.name in FINISHED


def follow_or_leave(experiment: Experiment, env: Env, *, attached: bool) -> int:
    """What a command does with jobs that it has submitted: `follow` them, or print how to. Returns its exit code."""
    jobs = submitted_jobs(experiment, env)
    if attached:
        return follow(jobs)
    print(how_to_follow(jobs), flush=True)
    return DONE


def follow(jobs: Sequence[SlurmJob]) -> int:
    """Follow `jobs`, each of which starts when the one before it has succeeded, until the last ends or one fails.

    For Ctrl-C, SIGTERM and a cluster that does not answer see `attend`.

    Returns:
        0 all completed; the script's own 1, 2, 130 or 143; 1 for whatever else Slurm ended a job with; 130 cancelled by
        Ctrl-C; 143 after SIGTERM.
    """
    return attend(_Follower(jobs))


class _Follower:
    """Where following has got to; goes on there after a question."""

    def __init__(self, jobs: Sequence[SlurmJob]) -> None:
        self.jobs = jobs
        self.signals: list[int] = []
        self.told_to_stop = False
        self.current = 0
        self.attempt, self.offset = 0, 0
        self.shown: State | None = None

    def run(self) -> int:
        while self.current < len(self.jobs):
            state = self._to_the_end(self.jobs[self.current])
            code = self._report(self.jobs[self.current], state)
            if code != DONE:
                return code
            self.current += 1
            self.attempt, self.offset, self.shown = 0, 0, None
        return DONE

    @property
    def left(self) -> str:
        jobs = self.jobs[self.current :]
        return f"{plural(len(jobs), 'job')} {', '.join(job.id for job in jobs)}"

    @property
    def how_to_go_on(self) -> str:
        return how_to_follow(self.jobs)

    def cancel(self) -> int:
        """Cancel the current job and those behind it, and follow the current one to its end: INTERRUPTED.

        DONE, where it was the last one and ended well before it could be cancelled. Where scancel fails and all are
        over, as `run`.
        """
        jobs = self.jobs[self.current :]
        ids = " ".join(job.id for job in reversed(jobs))
        answer = jobs[0].shell.run(f"scancel --quiet {ids}")  # quiet: a job that has just ended is no error
        if answer.code != 0:
            if not all(self._is_over(job) for job in jobs):
                raise RunFailed(f"scancel failed: {answer.stderr.strip()}")
            with contextlib.suppress(SignalNoted):
                return self.run()
            return INTERRUPTED
        self.told_to_stop = True
        say(f"cancelling {self.left}")
        with contextlib.suppress(SignalNoted):
            state = self._to_the_end(jobs[0])
            if state.name == "COMPLETED" and len(jobs) == 1:
                return self._report(jobs[0], state)
            report(Interrupted(f"{self.left} cancelled", f"log: {jobs[0].log(self.attempt)}"))
        return INTERRUPTED

    def _is_over(self, job: SlurmJob) -> bool:
        state, _ = _poll(job, self.attempt, self.offset, True)
        return state is not None and state.finished

    def _to_the_end(self, job: SlurmJob) -> State:
        """Show log and states of a job until it has ended."""
        looked = 0.0
        started = time.monotonic()
        while True:
            # Every look costs the controller something: often at first, when much changes.
            pause = 2 if time.monotonic() - started < 120 else 5
            ended = self.shown is not None and self.shown.finished
            look = self.shown is None or ended or time.monotonic() - looked > pause
            state, log = self._patiently(job, lambda: _poll(job, self.attempt, self.offset, look))  # noqa: B023
            if look:
                looked = time.monotonic()
            self.offset += len(log)
            sys.stdout.buffer.write(log)
            sys.stdout.buffer.flush()
            if len(log) == _READ_AT_MOST:
                continue
            if state is not None:
                self._show(job, state)
                if state.restarts > self.attempt:
                    self.attempt, self.offset = state.restarts, 0
                elif state.finished and not log:
                    return state
            self._heed_signals()
            if not log:
                time.sleep(1)

    def _heed_signals(self) -> None:
        if self.signals:
            raise SignalNoted

    def _patiently(self, job: SlurmJob, poll: Callable[[], tuple[State | None, bytes]]) -> tuple[State | None, bytes]:
        """`poll`, again and again while the connection is away."""
        patience = Patience()
        while True:
            try:
                answer = poll()
            except Unreachable as error:
                patience.lost(f"{error.message}; job {job.id} goes on, trying to reach it again", error)
                self._heed_signals()
                time.sleep(2)
                continue
            patience.answered("connected again")
            return answer

    def _show(self, job: SlurmJob, state: State) -> None:
        """Say what has changed."""
        before, self.shown = self.shown, state
        if before is not None and state.restarts > before.restarts:
            say(f"job {job.id} ({job.name}) requeued: restart {state.restarts} of {job.max_restarts}")
        if before is not None and (before.name, before.reason, before.nodes) == (state.name, state.reason, state.nodes):
            return
        if state.name == "PENDING":
            say(f"job {job.id} ({job.name}) pending" + (f": {state.reason}" if state.reason else ""))
        elif state.name == "RUNNING":
            say(f"job {job.id} ({job.name}) running on {state.nodes}")
        elif not state.finished and (before is None or before.name != state.name):
            say(f"job {job.id} ({job.name}) {state.name.lower()}")

    def _report(self, job: SlurmJob, state: State) -> int:
        """Say how a job ended, and return its exit code."""
        if state.name == "COMPLETED":
            say(f"job {job.id} ({job.name}) completed")
            return DONE
        behind = self.jobs[self.current + 1 :]
        log = f"log: {job.log(self.attempt)}"
        if behind:
            log = f"cancelled behind it: {', '.join(other.name for other in behind)}; {log}"
        what = f"job {job.id} ({job.name})"
        if state.name == "FAILED" and state.exit_code == PREEMPTED:
            code = PREEMPTED
            what += f" saved its checkpoint and left, after {self.attempt} of {job.max_restarts} restarts"
        elif state.name == "FAILED" and state.exit_code in (FAILED, REFUSED, INTERRUPTED):
            code, what = state.exit_code, f"{what} failed with exit code {state.exit_code}"
        else:
            causes = {"TIMEOUT": "its time limit", "NODE_FAIL": "a node failed", "OUT_OF_MEMORY": "out of memory"}
            what += f" ended {state.name}" + (f": {causes[state.name]}" if state.name in causes else "")
            code = FAILED
        for line in _last_words(job):
            say(line)
        report(RunFailed(what, log))
        return code


def _poll(job: SlurmJob, attempt: int, offset: int, look: bool) -> tuple[State | None, bytes]:
    """In one command: what is new in the log, and, if asked for, the state.

    Raises:
        Unreachable: the connection is lost, or Slurm does not answer.
    """
    read = f"tail -c +{offset + 1} {shlex.quote(job.log(attempt))} 2>/dev/null | head -c {_READ_AT_MOST}"
    ask = f"scontrol show job -o {job.id} 2>&1" if look else "true"
    # The state first: a log read after the end is whole.
    answer = job.shell.run(f"{ask}; printf '\\n--runspec--\\n'; {read}")
    status, _, log = answer.stdout.partition(_MARK)
    if not look:
        return None, log
    state = parse_scontrol(status.decode(errors="replace"))
    if state is None and b"Invalid job id" in status:
        state = _from_accounting(job)
    if state is None:
        lines = status.decode(errors="replace").strip().splitlines() or ["no answer"]
        raise Unreachable(f"Slurm does not say how job {job.id} is: {lines[-1]}")
    return state, log


def parse_scontrol(text: str) -> State | None:
    """The state in the line that `scontrol show job -o` prints; None where it holds none."""
    values = dict(re.findall(r"(?:^| )(JobState|Reason|NodeList|Restarts|ExitCode)=(\S*)", text))
    if "JobState" not in values:
        return None
    reason = values.get("Reason", "")
    return State(
        name=values["JobState"],
        reason="" if reason == "None" else reason,
        nodes="" if values.get("NodeList") == "(null)" else values.get("NodeList", ""),
        restarts=int(values.get("Restarts") or 0),
        exit_code=int(values.get("ExitCode", "0:0").partition(":")[0]),
    )


def _from_accounting(job: SlurmJob) -> State:
    """The final state from sacct, which may know a job that has just ended as pending, or not at all."""
    deadline = time.monotonic() + PATIENCE_UNKNOWN
    command = f"sacct -X -n -P -j {job.id} --format=State,ExitCode"
    while True:
        answer = job.shell.run(command)
        name, _, code = answer.text.partition("\n")[0].partition("|")
        if name:
            state = State(name.split()[0], exit_code=int(code.partition(":")[0] or 0))
            if state.name == "FAILED":
                # The accounting says 2 where the exit code was 130; the batch script has written down the true one.
                last_line = job.shell.run(
                    f"grep -o '^job exited with code [0-9]*' {shlex.quote(job.batch_log)} | tail -n 1"
                )
                state = replace(state, exit_code=int(last_line.text.rpartition(" ")[2] or state.exit_code))
            if state.finished:
                return state
        if time.monotonic() > deadline:
            reason = answer.stderr.strip() or "nothing"
            raise RunFailed(f"job {job.id}: neither scontrol nor sacct knows how it ended; sacct says: {reason}")
        time.sleep(1)


def _last_words(job: SlurmJob) -> list[str]:
    """What srun and Slurm themselves said at the end, at most three lines."""
    with contextlib.suppress(RunFailed):
        pattern = "'^(srun|slurmstepd|sbatch|slurmd): '"
        return job.shell.run(f"grep -E {pattern} {shlex.quote(job.batch_log)} | tail -n 3").text.splitlines()
    return []
