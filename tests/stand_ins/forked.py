"""Runs of Python programs that begin with their imports done: each is forked from a process that has done them.

Loading torch takes longer than most of what tests ask of a script. A program still is a process of its own, with an
environment, a folder, streams and an exit code of its own, and it ends as any other does. What it cannot show is what
it imports, and when: for that, for a signal in the middle, and for variables that Python or torch reads when it starts,
start a real one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# What `nemo-runspec` loads, and scripts of a stranger; the command line; scripts of data preparation; those that have
# to do with models.
OF_RUNSPEC = (
    "nemo_runspec.cli",
    "nemo_runspec.config",
    "nemo_runspec.artifacts",
    "nemo_runspec.publish",
    "pydantic",
    "omegaconf",
    "yaml",
)
OF_COMMANDS = (
    "nemotron.cli.main",
    "nemotron.kit.artifact",
    "nemotron.kit.schemas.training",
    "nemotron.kit.schemas.sources",
)
OF_OWN_COMMANDS = (*OF_COMMANDS, "known_makers")  # not for a project that has been forked: it has other recipes
OF_DATA = (
    "nemotron.recipes.nano3.stage0_pretrain.data_prep",
    "nemotron.recipes.nano3.stage1_sft.data_prep",
    "nemotron.recipes.nano3.stage2_rl.data_prep",
    "known_imports",
)
OF_MODELS = ("torch", *OF_DATA, "nemotron.recipes.nano3.stage3_eval.evaluate", "nemotron.recipes.tools.chat")


def run_forked(
    modules: tuple[str, ...], words: list[str], cwd: Path | str, env: Mapping[str, str], stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *words], text=True)` returns, begun with `modules` loaded.

    Args:
        words: a script, or `-m` and a module, and then its arguments.
        stdin: what it reads there, from a file; None: from the null device.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        if stdin is None:
            streams[0].symlink_to(os.devnull)
        else:
            streams[0].write_text(stdin)
        request = {"words": words, "cwd": str(cwd), "env": dict(env), "streams": [str(path) for path in streams]}
        server = _server(modules)
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in streams[1:]))


def forked_steps(
    modules: tuple[str, ...],
) -> Callable[[Sequence[str], Mapping[str, str], Path | None, object], int]:
    """What to put in the place of `nemo_runspec.execution.local._wait`: the processes of steps are such runs."""

    def wait(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None, forward: object) -> int:
        done = run_forked(modules, list(command[1:]), workdir or Path.cwd(), environment)
        print(done.stdout, end="", flush=True)
        print(done.stderr, end="", file=sys.stderr, flush=True)
        return done.returncode

    return wait


@functools.cache
def _server(modules: tuple[str, ...]) -> subprocess.Popen[str]:
    """The process that has loaded `modules` and waits for requests; one for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # Threads do not survive a fork: with one CPU, no library starts any when it is loaded.
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    with contextlib.suppress(OSError):
        server.communicate()


def _serve(modules: list[str]) -> list[str]:
    """Fork for every request; returns in the process of one, with the words of its program."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:  # the text on top of it stays as new, for the program
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        os.setsid()
        for number, path in enumerate(request["streams"]):
            stream = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT if number else os.O_RDONLY)
            os.dup2(stream, number)
            os.close(stream)
        words: list[str] = request["words"]
        return words
    raise SystemExit


if __name__ == "__main__":
    first, *rest = _serve(sys.argv[1:])
    if first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
