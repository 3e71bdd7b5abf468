"""The process that a benchmark runs in: its settings, its clocks, its memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

from nemo_runspec.execution.local import CPU_SETTINGS


def restart_with_cpu_settings() -> None:
    """Start this script again under CPU_SETTINGS, unless it was: they act when a process starts."""
    if os.environ.get("_SETTINGS") != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | CPU_SETTINGS | {"_SETTINGS": "1"})


class Clock:
    """Seconds since it was made: `wall`, and of processors, of this process and of its children that have ended."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), self._used()

    @staticmethod
    def _used() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    def read(self) -> tuple[float, float]:
        """(wall, processor) seconds."""
        return time.perf_counter() - self._wall, self._used() - self._processor


def forget_peak() -> None:
    """Let `resident("VmHWM")` count from here (`ru_maxrss` would start from the parent's)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> float:
    """Resident memory of this process in MB: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith(field))
