"""What runs inside the sandbox: a program that a model wrote, once for each test, in a process of its own.

`sandbox.run_program` starts it as `python -c` with this file's text, so it imports nothing but the standard library.
It reads a job from stdin and writes a line for each test to stdout: what became of it, and what the program returned or
printed. What was expected is not known here. So a program that takes this process over gains nothing: all that it could
write in its place is outputs, and those are compared outside.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import signal
import sys
import threading
from types import ModuleType
from typing import Any

# What solutions of programming contests take for granted: LiveCodeBench's runner imports these, and all of their names.
_PRELUDE = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "builtins typing"
)


def main() -> None:
    """Give up rights, read the job, say that all is ready, run the tests up to the first that fails."""
    settings = json.loads(sys.argv[1])
    if settings["uid"] is not None:  # started by root: from here on a user that nobody else is
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    for name, value in settings["rlimits"].items():
        _limit(name, value)
    job = json.load(sys.stdin)
    names = _prelude() if job["prelude"] else {}
    print("ready", flush=True)
    for text in job["inputs"]:
        result = _run_in_child(job, text, names, settings)
        print(json.dumps(result), flush=True)
        if "output" not in result:
            break


def _limit(name: str, value: int, grace: int = 0) -> None:
    """Set a resource limit, for good, but never above the one in force; the hard one is `grace` over the soft one."""
    number = getattr(resource, f"RLIMIT_{name}")
    in_force = resource.getrlimit(number)[1]
    limits = (value, value + grace)
    if in_force != resource.RLIM_INFINITY:
        limits = (min(value, in_force), min(value + grace, in_force))
    resource.setrlimit(number, limits)


def _prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name in _PRELUDE.split():
        exec(f"from {name} import *", names)
    return names | {name: sys.modules[name] for name in _PRELUDE.split()}


def _run_in_child(job: dict[str, Any], text: str, names: dict[str, Any], settings: dict[str, Any]) -> dict[str, str]:
    """{"output": text} of one test, or {"failure": reason}."""
    # Files in memory, not pipes: nobody has to read while the program runs, and the system limits their size.
    stdin, printed, returned = (os.memfd_create(name) for name in ("stdin", "printed", "returned"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.write(stdin, text.encode() if job["fn_name"] is None else b"")
            # SIGXCPU says that it was the limit; what ignores it is killed a second later. The clock of the limit
            # counts ticks, and may be ahead of the one that reports usage by a tenth where a host takes time away.
            _limit("CPU", settings["cpu_seconds"], grace=1)
            _limit("FSIZE", settings["output_bytes"])
            os.lseek(stdin, 0, os.SEEK_SET)
            for source, target in ((stdin, 0), (printed, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
                os.dup2(source, target)
            _run_test(job, text, names, returned)
            status = 0
        finally:
            os._exit(status)
    timed_out = False

    def end_test(*_: object) -> None:
        nonlocal timed_out
        timed_out = True
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_test)
    signal.setitimer(signal.ITIMER_REAL, settings["wall_seconds"])
    _, status, usage = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    output = _content(printed if job["fn_name"] is None else returned)
    for file in (stdin, printed, returned):
        os.close(file)
    used = usage.ru_utime + usage.ru_stime
    if used > settings["cpu_seconds"] or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return {"failure": f"more than {settings['cpu_seconds']} s of processor time"}
    if timed_out:
        return {"failure": f"more than {settings['wall_seconds']:g} s"}
    if os.WIFSIGNALED(status):
        return {"failure": f"killed by signal {os.WTERMSIG(status)}"}
    if status != 0:
        return {"failure": "raised, or exited with an error"}
    return {"output": output}


def _content(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, size, 0).decode(errors="replace")


def _run_test(job: dict[str, Any], text: str, names: dict[str, Any], returned: int) -> None:
    """Run the program, in this process: with the text on stdin, or call its function and write what that returns."""
    # Under two names, as Python has them: else a file that a program replaces would end, and its buffer with it.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        vars(sys)[name] = vars(sys)[f"__{name}__"] = open(number, mode, closefd=False)  # noqa: SIM115
    sys.argv[:] = ["program.py"]  # ours has the settings behind it, which a program may take for a file of its own
    sys.setrecursionlimit(50_000)
    threading.excepthook = _fail
    module = ModuleType("__main__" if job["fn_name"] is None else "solution")
    sys.modules[module.__name__] = module
    # `python -S` leaves the first two out, and programs for contests end with them.
    vars(module).update({"exit": sys.exit, "quit": sys.exit, **names})
    try:
        # It would inherit that annotations are not evaluated in this file, and pass with a List that it never imports.
        exec(compile(job["program"], "program.py", "exec", dont_inherit=True), vars(module))
        if job["fn_name"] is not None:
            owner = module.Solution() if hasattr(module, "Solution") else module  # as LeetCode has it
            arguments = [json.loads(line) for line in text.split("\n")]
            value = getattr(owner, job["fn_name"])(*arguments)
            os.write(returned, json.dumps(value).encode())
    except SystemExit as end:
        if job["fn_name"] is not None or end.code not in (None, 0):
            raise
    for thread in threading.enumerate():  # programs with deep recursion run in a thread with a larger stack
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for printed in (sys.stdout, sys.__stdout__):  # contest programs write to the latter in the end
        if printed is not None:
            printed.flush()


def _fail(raised: threading.ExceptHookArgs) -> None:
    """What raises in a thread fails as what raises outside of one."""
    if raised.exc_type is not SystemExit:
        os._exit(1)


if __name__ == "__main__":
    main()
