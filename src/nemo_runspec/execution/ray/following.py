"""Stay attached to a job on a Ray cluster: print its log and states, pass Ctrl-C on, and end with its own exit code."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from nemo_runspec.errors import DONE, FAILED, INTERRUPTED, PREEMPTED, REFUSED, Interrupted, RunFailed, report
from nemo_runspec.execution.interrupts import Patience, SignalNoted, Unreachable, attend, say
from nemo_runspec.execution.ray.jobs import RayJob, connect, how_to_follow, reason

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

# What the client raises then: requests' errors are OSErrors.
_NO_ANSWER = (RuntimeError, OSError)


def follow(job: RayJob) -> int:
    """Follow a job to its end: its log goes to stdout, what Ray does with it to stderr.

    For Ctrl-C, SIGTERM and a cluster that does not answer see `attend`.

    Returns:
        0 succeeded; the script's own 1, 2, 130 or 143; 1 for whatever else it ended with, and where the cluster no
        longer answers; 130 cancelled by Ctrl-C; 143 after SIGTERM.
    """
    return attend(_Follower(job))


class _Follower:
    """Where following has got to; goes on there after a question."""

    def __init__(self, job: RayJob) -> None:
        self.job = job
        self.left, self.how_to_go_on = f"job {job.id}", how_to_follow(job)
        self.signals: list[int] = []
        self.told_to_stop = False
        self.client: JobSubmissionClient | None = None
        self.printed = 0  # characters of the log
        self.shown = ""
        self.patience = Patience()

    def run(self) -> int:
        """Follow the job to its end, and return its exit code."""
        import asyncio  # which takes as long to import as typer

        from aiohttp import ClientError  # of the websocket that the log comes over

        while not self.signals:
            details = self._details()
            if details is not None:
                self._show(details.status)
                if details.status.is_terminal():
                    self._rest_of_log()
                    return self._report(details)
                if details.status != "PENDING":
                    with contextlib.suppress(*_NO_ANSWER, ClientError):  # the next look at the job shows why
                        asyncio.run(self._stream())
            time.sleep(0.3)
        raise SignalNoted

    def cancel(self) -> int:
        """Ask Ray to stop the job, and follow it to its end: Ray sends SIGTERM and, some seconds later, SIGKILL."""
        try:
            self._connected().stop_job(self.job.id)
        except _NO_ANSWER as error:
            raise self._unreachable(error) from error
        self.told_to_stop = True
        say(f"cancelling job {self.job.id}")
        while not self.signals:
            details = self._details()
            if details is not None and details.status.is_terminal():
                self._rest_of_log()
                self._show(details.status)
                break
            time.sleep(0.3)
        report(Interrupted(f"job {self.job.id} cancelled"))
        return INTERRUPTED

    def _connected(self) -> JobSubmissionClient:
        if self.client is None:
            self.client = connect(self.job.address)
        return self.client

    def _details(self) -> Any | None:
        """What Ray says of the job; None where the cluster does not answer just now.

        Raises:
            Unreachable: it has not for a long time.
        """
        try:
            details = self._connected().get_job_info(self.job.id)
        except _NO_ANSWER as error:
            away = self._unreachable(error)
            self.patience.lost(f"{away.message}; asking again", away)
            return None
        self.patience.answered("answered again")
        return details

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(f"no answer about job {self.job.id}: {reason(error)}")

    async def _stream(self) -> None:
        """Print the log as it grows, until the job has ended, the connection breaks, or a signal has been noted."""
        import asyncio

        skip = self.printed  # the stream begins at the beginning
        stream = self._connected().tail_job_logs(self.job.id)
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
            piece = asyncio.ensure_future(anext(stream))
        piece.cancel()

    def _rest_of_log(self) -> None:
        with contextlib.suppress(*_NO_ANSWER):  # the log of a job that never began
            self._print(self._connected().get_job_logs(self.job.id)[self.printed :])

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
        log = f"log: ray job logs --address {shlex.quote(self.job.shown_address)} {self.job.id}"
        code: int | None = details.driver_exit_code
        if details.status == "STOPPED":
            code, how = FAILED, "was stopped by somebody else"
        elif code is None:  # it never ran
            code, how = FAILED, f"failed: {reason(details.message)}"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                log = f"out of memory, perhaps; {log}"
        else:
            how = f"failed with exit code {code}"
        report(RunFailed(f"job {self.job.id} {how}", log))
        return code if code in (FAILED, REFUSED, INTERRUPTED, PREEMPTED) else FAILED
