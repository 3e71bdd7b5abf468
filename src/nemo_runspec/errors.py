"""Errors that a user sees, and the exit codes they become.

Exit codes of every command and every script: 0 done; 1 failed while working; 2 refused before any work;
130 interrupted; 143 stopped by a signal. `run_main` is the one place that maps exceptions to them.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import io
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from nemo_runspec.variables import ARTIFACTS_ROOT, FRESH, OUTPUT_ROOT, RESTARTS
from nemo_runspec.variables import EXIT_CODE_FILE as EXIT_CODE_FILE

DONE, FAILED, REFUSED, INTERRUPTED, PREEMPTED = 0, 1, 2, 130, 143

# Seconds that the other ranks wait for the exit code of rank 0 after a signal.
WAIT_FOR_RANK_0 = 600
# Seconds that they wait for it after an error, which is mostly that of all ranks.
WAIT_FOR_THE_SAME_ERROR = 5
# Seconds after a signal in which another one is the same, on its way through a launcher.
SAME_SIGNAL = 5

# What a file system refuses to this user: nothing is wrong with the program or with the file.
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)

DEBUG = "RUNSPEC_DEBUG"


class RunspecError(Exception):
    """Base of the errors that are shown as one or two lines instead of a traceback.

    Args:
        message: one line: what is wrong, naming file, key, value and allowed range as far as they apply.
        hint: one more line: what to do about it.
    """

    exit_code = FAILED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: without `__init__`, whose arguments are other ones in some kinds of errors."""
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"

    def at(self, place: str) -> Self:
        """This error, its message beginning with the place (file, key, step) that it was met at; to be raised again."""
        self.message = f"{place}: {self.message}"
        self.args = (self.message,)
        return self


class UserError(RunspecError):
    """Refused before any work: usage, config, missing or corrupt input. Exit 2."""

    exit_code = REFUSED


class ArtifactError(UserError):
    """An artifact is missing, or not as it was published.

    `name` is the artifact's: the caller of `run_main` may know which command makes it.
    """

    def __init__(self, message: str, hint: str | None, name: str, *, corrupt: bool = False) -> None:
        super().__init__(message, hint)
        self.name = name
        self.corrupt = corrupt


class RunFailed(RunspecError):
    """Failed while working. Exit 1."""

    exit_code = FAILED


class Interrupted(RunspecError):
    """Stopped by Ctrl-C. Exit 130."""

    exit_code = INTERRUPTED


class Preempted(RunspecError):
    """A signal asked the run to leave, and it saved `checkpoint` first. Exit 143."""

    exit_code = PREEMPTED

    def __init__(self, checkpoint: str | Path) -> None:
        super().__init__(f"stopped on a signal; checkpoint saved: {checkpoint}", how_to_resume())
        self.checkpoint = checkpoint


def how_to_resume() -> str:
    """The hint behind a saved checkpoint. `--force` starts afresh, so not with that."""
    if os.environ.get(FRESH):
        return "the command of this step, without --force, resumes from it"
    return "the same command resumes from it"


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like `word` (case ignored) and is not `word` itself, or None when nothing is close."""
    by_lower = {choice.lower(): choice for choice in choices if choice != word}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str], what: str = "choose from") -> str | None:
    """The hint for a misspelt `word`: the nearest choice, else the list of all, else None when there are none."""
    choices = list(choices)
    near = nearest(word, choices)
    if near is not None:
        return f"did you mean {near}?"
    return f"{what}: {', '.join(choices)}" if choices else None


def leaving_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to save what it has and to leave with 143.

    SIGTERM; SIGUSR1, with which Slurm warns; SIGHUP, that of a closed terminal, unless it is ignored as under nohup.
    """
    signals = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
    return tuple(each for each in signals if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN)


def say_in_handler(number: int, text: str) -> None:
    """Write `text` to stderr in the handler of signal `number`, where print() must not be re-entered.

    After SIGHUP stdout and stderr lead nowhere, unless they are files: the terminal is gone, and so is whoever read a
    pipe there (`| tee log`). Printing would fail, and that must not keep the process from saving.
    """
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    if signal.Signals(number).name == "SIGHUP":
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                if not stat.S_ISREG(os.fstat(stream).st_mode):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream)
                    os.close(nowhere)


def end_on_signals() -> None:
    """Make Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP end this process in one line, with exit code 130 or 143.

    `begin_script` calls it before a script imports what takes seconds, where Ctrl-C would print a traceback.
    Until `run_main` there is nothing to clean up, and the process leaves at once; from then on Ctrl-C raises
    KeyboardInterrupt and the others SystemExit. A loop that has something to save puts handlers of its own over these.
    """
    for number in (signal.SIGINT, *leaving_signals()):
        signal.signal(number, _end)
    sys.unraisablehook = _raise_later
    atexit.register(_end_undisturbed)  # the first one registered is the last one called
    release_interrupts()


def _end_undisturbed() -> None:
    """From here on, all is done and Python puts the default handlers back: a signal would kill a script that is done.

    SIGALRM among them, with which `_raise_later` comes back.
    """
    for number in (signal.SIGINT, signal.SIGALRM, *leaving_signals()):
        signal.signal(number, signal.SIG_IGN)


def hold_interrupts() -> None:
    """Keep Ctrl-C waiting: for a process about to become a script, whose first lines could only show a traceback.

    exec keeps what is blocked; `end_on_signals` or `run_main` of the script lets it through.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def release_interrupts() -> None:
    """Let a Ctrl-C through that `hold_interrupts` has kept."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


main_began = False
# Whether a run has been opened since `run_main` began: what fails from then on has not been refused before any work.
work_began = False


def _raise_later(lost: sys.UnraisableHookArgs) -> None:
    """Raise once more, a tenth of a second later, what a signal's handler raised and Python has dropped.

    It drops it where the signal comes in a callback of os.fork or in a destructor, whose exceptions lead nowhere.
    """
    error = lost.exc_value
    if not isinstance(error, KeyboardInterrupt | SystemExit) or not hasattr(signal, "setitimer"):
        sys.__unraisablehook__(lost)
        return

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise error

    signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def _end(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT and main_began:
        raise KeyboardInterrupt
    code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    if os.environ.get("RANK", "0") == "0":
        say_in_handler(number, f"error: {what}\nthe same command starts again\n")
    _leave_exit_code(code)
    if main_began:
        raise SystemExit(code)  # which no `except Exception` stops
    os._exit(code)


def run_main(fn: Callable[[], int | None], hint_for: Callable[[RunspecError], str | None] | None = None) -> int:
    """Run `fn` (a script's main, a command line) and return the exit code that its outcome stands for.

    `fn` returns None or 0 for done, or its own exit code. A `RunspecError` is printed to stderr as `error: message`
    and its hint; a full disk, and a path that may not be read or written, as one line (once a run is open: code 1,
    below its traceback). Every other exception is a bug and keeps its traceback.
    `--debug` on the command line, or RUNSPEC_DEBUG=1, shows the traceback of the former too. A stream that is closed
    (`>&-`) is the null device, and a current folder that somebody has removed is an error of one line.

    Args:
        hint_for: a better hint for an error than its own, if the caller has one: the command that makes an artifact.
    """
    global main_began, work_began
    main_began, work_began = True, False
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # an arrow in Latin-1, an undecodable file name: as stderr shows them
        sys.stdout.reconfigure(errors="backslashreplace")
    # Of a script without `begin_script`, and of a command line. Handlers belong to the main thread.
    handled_here = leaving_signals() if threading.current_thread() is threading.main_thread() else ()
    unhandled = [number for number in handled_here if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in unhandled:
            signal.signal(number, _end)
        release_interrupts()
        code = fn() or DONE
    except RunspecError as error:
        code = error.exit_code
        error.hint = (hint_for(error) if hint_for else None) or error.hint
        report(error)
    except KeyboardInterrupt as error:
        code = INTERRUPTED
        report(error, "interrupted")
    except BrokenPipeError:
        if not _reader_left():  # another pipe: to a process that died, say
            raise
        code = FAILED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DENIED and error.filename:
            code = FAILED if work_began else REFUSED
            if work_began and not debugging():  # hours in, whoever looks for the cause needs the place in the code
                traceback.print_exception(error)
            report(error, f"{error.filename}: {error.strerror}")
        elif isinstance(error, FileNotFoundError) and not work_began and _folder_is_gone():
            code = REFUSED
            report(error, "the current folder has been removed", "cd to one that exists")
        elif _disk_full(error):
            code = FAILED
            where = error.filename if isinstance(error, OSError) and error.filename else _fullest_folder()
            report(error, f"no space left on device: {where}", "free some space; the same command goes on where it was")
        else:
            raise
    finally:
        for number in unhandled:
            if signal.getsignal(number) is _end:  # not what `fn` has put there
                signal.signal(number, signal.SIG_DFL)
    _leave_exit_code(code)
    return DONE if code == PREEMPTED and RESTARTS in os.environ else code


def _open_closed_streams() -> None:
    """Make the null device of standard streams that are closed: else the next file opened would get their numbers, and
    with them what a child prints."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # each takes the lowest number that is free
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123  as long as the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return True
    return False


def _reader_left() -> bool:
    """Whether nobody reads our stdout any more (`… | head`). It is then closed: Python would complain once more."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        left = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except BrokenPipeError:
        left = True
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def first_line(error: object) -> str:
    """The first line of an error's text that says something; its kind where none does."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def report(error: BaseException, message: str | None = None, hint: str | None = None) -> None:
    """Print `error` to stderr in one or two lines, with its traceback in debug mode.

    Of several ranks, rank 0 does; another one only where rank 0 goes on without this error.
    """
    stopped = isinstance(error, KeyboardInterrupt | Interrupted | Preempted)  # all ranks are, and rank 0 may be saving
    if os.environ.get("RANK", "0") != "0" and (stopped or _rank_0_ends_too()):
        return
    if isinstance(error, RunspecError):
        message, hint = error.message, error.hint
    if debugging():
        traceback.print_exception(error)
    print(f"error: {message or error}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    sys.stderr.flush()


def _rank_0_ends_too() -> bool:
    """Wait until rank 0 has left its exit code, for it may be the slower one; False where it has not after a while.

    A launcher stops all ranks once one has ended: one that left at once would cut off what rank 0 has to say.
    """
    path = os.environ.get(EXIT_CODE_FILE)
    deadline = time.monotonic() + WAIT_FOR_THE_SAME_ERROR
    while path and not Path(path).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def debugging() -> bool:
    """Whether tracebacks are wanted: `--debug` on the command line, or RUNSPEC_DEBUG set to anything but 0."""
    return "--debug" in sys.argv[1:] or os.environ.get(DEBUG, "0") not in ("", "0")


def _disk_full(error: BaseException) -> bool:
    """Whether `error` comes from a full disk. Native writers (Arrow, safetensors) say so only in their message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "No space left on device" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _fullest_folder() -> str:
    """Of the folders that a run writes to, the one with the least space: for an error that names no file."""
    import shutil
    import tempfile

    roots = [os.environ.get(OUTPUT_ROOT) or "output", os.environ.get(ARTIFACTS_ROOT, ""), tempfile.gettempdir()]
    folders = [Path(root).expanduser().absolute() for root in roots if root and "://" not in root]
    existing = [next(folder for folder in (root, *root.parents) if folder.is_dir()) for root in folders]
    return str(min(existing, key=lambda folder: shutil.disk_usage(folder).free))


def _leave_exit_code(code: int) -> None:
    path = os.environ.get(EXIT_CODE_FILE)
    if not path:
        return
    if os.environ.get("RANK", "0") == "0":
        try:
            Path(path).write_text(f"{code}\n", encoding="utf-8")
        except OSError:  # a full disk: the launcher has to go by the exit code itself
            os.environ.pop(RESTARTS, None)
    elif code in (INTERRUPTED, PREEMPTED):
        # A launcher stops all ranks once one has ended, and rank 0 may still be writing the checkpoint. The signal that
        # ended this rank may come twice, from Slurm itself and passed on: only a later SIGTERM ends the wait.
        for number in leaving_signals():
            signal.signal(number, signal.SIG_IGN)
        begin = time.monotonic()
        while not Path(path).exists() and time.monotonic() < begin + WAIT_FOR_RANK_0:
            if time.monotonic() > begin + SAME_SIGNAL:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(0.1)
