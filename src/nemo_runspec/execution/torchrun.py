"""torchrun that ends as the process that ended first: with its exit code, where torchrun itself makes 1 of all.

On this machine without its page of traceback, for that process has said why itself. On a cluster its words stay: they
tell which rank ended, on which host.
"""

from __future__ import annotations

import signal

from nemo_runspec.errors import end_on_signals

# Its import takes seconds: until then Ctrl-C is one line, as in a script. Where every process of a job is signalled it
# has been told to ignore that, for its workers save (`_before_child` in local.py).
if __name__ == "__main__" and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
    end_on_signals()

import contextlib
import importlib
import logging
import os
import sys
from typing import Any


def main() -> int:
    """Run torchrun; end as the process that ended first: with its exit code, or of the signal that killed it."""
    torchrun: Any = importlib.import_module("torch.distributed.run")  # what is in this package imports no torch
    on_cluster = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    if not on_cluster:
        logging.disable(logging.ERROR)  # which say in other words that a process has ended
    try:
        torchrun.main(sys.argv[1:])
    except Exception as error:
        if type(error).__name__ == "SignalException":  # torchrun got one, and has passed it on
            return 128 + int(error.sigval)  # type: ignore[attr-defined]
        if type(error).__name__ != "ChildFailedError":
            raise
        if on_cluster:
            print(error, file=sys.stderr)
        _, failure = error.get_first_failure()  # type: ignore[attr-defined]
        if failure.exitcode < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no other handler
                signal.signal(-failure.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -failure.exitcode)
        return int(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
