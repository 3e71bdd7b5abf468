"""torchrun on this machine, without its page of traceback where a process has ended: that one has said why itself."""

from __future__ import annotations

from nemo_runspec.errors import end_on_signals

if __name__ == "__main__":  # its import takes seconds: until then Ctrl-C is one line, as in a script
    end_on_signals()

import contextlib
import importlib
import logging
import os
import signal
import sys
from typing import Any


def main() -> int:
    """Run torchrun; end as the process that ended first: with its exit code, or of the signal that killed it."""
    torchrun: Any = importlib.import_module("torch.distributed.run")  # what is in this package imports no torch
    logging.disable(logging.ERROR)  # which say in other words that a process has ended
    try:
        torchrun.main(sys.argv[1:])
    except Exception as error:
        if type(error).__name__ == "SignalException":  # torchrun got one, and has passed it on
            return 128 + int(error.sigval)  # type: ignore[attr-defined]
        if type(error).__name__ != "ChildFailedError":
            raise
        _, failure = error.get_first_failure()  # type: ignore[attr-defined]
        if failure.exitcode < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no other handler
                signal.signal(-failure.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -failure.exitcode)
        return int(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
