"""What a script does first, so that what fails while it imports its libraries is a line, not a page of traceback."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import TracebackType

from nemo_runspec.errors import EXIT_CODE_FILE, end_on_signals, run_main
from nemo_runspec.execution.local import CPU_SETTINGS, die_with_parent

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h
_LARGEST = 2**31 - 1  # bytes, in an int


def begin_script() -> None:
    """Make Ctrl-C, the signals of `end_on_signals` and a missing library end this script in one or two lines.

    Called before everything else that the script imports: its libraries take seconds, and some come with an extra. So
    OpenMP still reads what a launcher would have set; C's memory allocator has read its variables, and is told.
    """
    end_on_signals()
    if not any(name in os.environ for name in CPU_SETTINGS if name.startswith("MALLOC")):
        _keep_freed_memory()
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.setdefault(name, CPU_SETTINGS[name])
    sys.excepthook = _uncaught
    if EXIT_CODE_FILE in os.environ:  # one of torchrun's workers, which would outlive a `kill -9` of the command
        die_with_parent()


def _keep_freed_memory() -> None:
    """What the allocator's variables among `CPU_SETTINGS` do, in a process that runs already; only glibc has both."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _LARGEST):  # an older glibc refuses more than 32 MiB
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    from nemo_runspec.installation import without_library

    refusal = without_library(error, Path(sys.argv[0])) if isinstance(error, ModuleNotFoundError) else None
    if refusal is None:
        sys.__excepthook__(kind, error, trace)
        return

    def refuse() -> None:
        raise refusal from error

    sys.exit(run_main(refuse))
