"""The CPUs of this machine."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """CPUs that the scheduler lets this process use; taskset and Slurm narrow them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
