"""Functions that may take minutes or all memory for some short texts, called in a process that can be killed.

SymPy does for `9^{9^{9}}`, a regular expression for `(a+)+$`, and no thread can be stopped in either. So one process
calls the functions of a module, started at the first call and used for many; past its limits it dies, and the next
call starts another. This file is both ends: imported, it asks; run as a script, it answers. There it imports nothing of
the project, and loads the functions by the path of their file: a module that imports nothing of the project either
starts in a fraction of the time that the project takes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

WALL_SECONDS = 120.0
MEMORY_BYTES = 2 << 30
Result = TypeVar("Result")


class UndecidedError(Exception):
    """No result: a limit was reached, or the function raised."""


class OutOfTimeError(UndecidedError):
    """No result within the limit of time."""


# --- The end that asks ------------------------------------------------------------------------------------------------


class Worker:
    """The process that calls the functions of a module; none is started before the first call.

    Args:
        module: its functions take and return JSON; one called `begin` is called first, and its time counts against no
            call.
        cpu_seconds: a call's limit, in processor time, so that a result does not depend on how busy the machine is.
    """

    _stop: Callable[[], object]  # ends the process; called when nothing refers to the worker any more, and at exit, too

    def __init__(self, module: ModuleType, cpu_seconds: float) -> None:
        self.module, self.cpu_seconds = module, cpu_seconds
        self.process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started it: the pipes of a forked parent are not ours
        self._lock = threading.Lock()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What a function of the module returns; calls from several threads wait for each other.

        Raises:
            OutOfTimeError: it took more than `cpu_seconds`.
            UndecidedError: it ran out of memory, raised an exception, or had not got `cpu_seconds` of the processor
                after `WALL_SECONDS`.
        """
        with self._lock:
            process = self._running()
            try:
                reply = _ask(process, json.dumps([function.__name__, arguments]) + "\n")
            except BaseException:  # interrupted: the reply that is still to come would be taken for that of the next
                self._end()
                raise
            if not reply.endswith("\n"):  # it has ended, perhaps while it answered
                code = process.wait()
                self._end()
                if code == -signal.SIGPROF:
                    raise OutOfTimeError(f"it takes more than {self.cpu_seconds:g} s of processor time")
                if code == -signal.SIGALRM:
                    raise UndecidedError(f"no answer within {WALL_SECONDS:g} s")
                raise UndecidedError(f"the process that was asked ended with {code}")
        outcome = json.loads(reply)
        if "failure" in outcome:
            raise UndecidedError(outcome["failure"])
        result: Result = outcome["value"]
        return result

    def _running(self) -> subprocess.Popen[str]:
        """The process, started if there is none."""
        if self.process is None or self._owner != os.getpid():
            # -P: this folder has files named like modules of the standard library. A hash seed, for SymPy's orders to
            # be the same in every run; one thread of OpenBLAS, for each takes address space, which is limited. A
            # session of its own: Ctrl-C in the terminal is for the parent, which decides.
            settings = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self.module.__file__), str(self.cpu_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | settings,
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
            self._owner = os.getpid()
            self._stop = weakref.finalize(self, _stop, self.process, self._owner)
        return self.process

    def _end(self) -> None:
        self._stop()
        self.process = None


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """The line that answers; no whole line if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:  # not a child of a fork, which would end what its parent uses
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # a question that it did not read
                if pipe is not None:
                    pipe.close()


# --- The end that answers ---------------------------------------------------------------------------------------------


def main(file: str, cpu_seconds: float) -> None:
    """Answer until stdin closes: a line `[function, arguments]` each, and a line with its `value` or its `failure`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, which saves and closes our stdin
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no reply
    with contextlib.suppress(ValueError, OSError):  # macOS knows the limit and does not set it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    functions = _loaded(file)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        # Both signals end this process, whatever it is in: a deadline cannot be caught or forgotten.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            outcome = {"value": getattr(functions, function)(*arguments)}
        except MemoryError:  # what took it may be kept for good, in a cache: the process ends
            raise
        except Exception as failure:
            outcome = {"failure": f"{type(failure).__name__} in {function}"}  # its text may take long to print
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(outcome), file=replies, flush=True)


def _loaded(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("functions", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look annotations up there
    spec.loader.exec_module(module)
    if hasattr(module, "begin"):
        module.begin()
    return module


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
