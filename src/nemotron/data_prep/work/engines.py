"""Where the tasks of a data preparation run: in this process, in a pool of processes, or on a Ray cluster.

A preparation cuts its work into tasks whose content depends on the inputs only, and asks an engine for the results
in order. So what is written is the same, byte for byte, whichever engine ran it and with however many workers::

    with open_engine() as engine:
        for result in engine.map_ordered(function, items, shared):
            ...

`function(item, shared)` is a module's function (workers import it by name). `items` are read as the workers need them,
never far ahead. A task that raises stops the whole: the error that is seen is that of the first such item in order. A
worker that dies (out of memory, a node that is gone) has its task repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from nemo_runspec.cpus import usable_cpus
from nemo_runspec.errors import RunFailed, RunspecError, UserError, leaving_signals
from nemo_runspec.execution.local import die_with_parent
from nemo_runspec.variables import RAY_ADDRESS
from nemotron.kit.ray_cluster import join_ray, signals_wait

Item = TypeVar("Item")
Shared = TypeVar("Shared")
Result = TypeVar("Result")
Function = Callable[[Item, Shared], Result]

# Tasks that are begun or done and not yet asked for, per worker: enough that a slow one does not stop the others, few
# enough that memory holds some megabytes of each.
AHEAD = 4
# A task whose worker died runs so many times more. One that raises does not: it would raise again.
RETRIES = 2
# Of the tiny pretraining data, this process does a ninth of the work itself (order, duplicates, writing): a pool beyond
# this would wait for it.
MAX_PROCESSES = 16

_WAIT_SECONDS = 0.2  # for a result on Ray, before signals are looked at again


def open_engine() -> contextlib.AbstractContextManager[Engine]:
    """The engine for this process, closed at the end of the `with`: nothing of it survives that.

    On Ray where RAY_ADDRESS names a cluster (a Ray job, and a Slurm job with `launch = "ray"`, have it set); else a
    process for every CPU that this one may use; with one CPU, this process. Open it before the script starts threads or
    takes locks: on Linux the workers are forked.

    Raises:
        UserError: RAY_ADDRESS is set, and Ray is not installed or no cluster answers there.
    """
    address = os.environ.get(RAY_ADDRESS)
    if address:
        return RayEngine(address)
    count = min(usable_cpus(), MAX_PROCESSES)
    return PoolEngine(count) if count > 1 else SerialEngine()


class SerialEngine:
    """Runs tasks in this process, each when its result is asked for."""

    workers = 1

    def map_ordered(
        self, function: Function[Item, Shared, Result], items: Iterable[Item], shared: Shared
    ) -> Iterator[Result]:
        """Yield `function(item, shared)` of every item, in order."""
        for number, item in enumerate(items):
            yield _opened(_apply(function, item, shared), number, item)

    def __enter__(self) -> SerialEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# --- Processes on this machine --------------------------------------------------------------------------------------


class PoolEngine:
    """Runs tasks in processes of this machine. No threads: a worker has one task at a time and waits for the next."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # Forking takes milliseconds and is safe in a process without threads; elsewhere the system's own libraries have
        # some, and a fresh interpreter imports everything again.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._pool: list[_Worker] = []

    def map_ordered(
        self, function: Function[Item, Shared, Result], items: Iterable[Item], shared: Shared
    ) -> Iterator[Result]:
        """Yield `function(item, shared)` of every item, in order.

        Raises:
            RunFailed: the worker of one task died again and again.
        """
        numbered: Iterator[tuple[int, Item]] = enumerate(items)
        first = list(itertools.islice(numbered, 2))
        if len(first) < 2:  # not worth a trip to another process
            for number, item in first:
                yield _opened(_apply(function, item, shared), number, item)
            return
        numbered = itertools.chain(first, numbered)
        self._fill()
        for worker in self._pool:
            worker.knows = None  # the shared value may be the same object with another content
        results: dict[int, tuple[Any, Any]] = {}  # number -> (item, result), waiting for its turn
        again: deque[_Task] = deque()  # tasks of dead workers
        turn = begun = 0
        try:
            while True:
                for worker in list(self._pool):
                    if worker.task is None and (again or begun < turn + AHEAD * self.workers):
                        task = again.popleft() if again else next((_Task(*pair) for pair in numbered), None)
                        if task is None:
                            break
                        begun = max(begun, task.number + 1)
                        if not worker.give(function, shared, task):
                            again.append(self._bury(worker, task))
                busy = {worker.pipe: worker for worker in self._pool if worker.task is not None}
                if turn not in results and not busy and not again:
                    return
                for pipe in multiprocessing.connection.wait(list(busy), 0 if turn in results or again else None):
                    worker = busy[pipe]
                    task, worker.task = worker.task, None
                    assert task is not None
                    try:
                        results[task.number] = task.item, worker.pipe.recv()
                    except (EOFError, OSError):
                        again.append(self._bury(worker, task))
                if turn in results:
                    item, result = results.pop(turn)
                    turn += 1
                    yield _opened(result, turn - 1, item)
        finally:
            for worker in [worker for worker in self._pool if worker.task is not None]:
                worker.kill()  # nobody will ask for what it is doing
                self._pool.remove(worker)

    def _fill(self) -> None:
        while len(self._pool) < self.workers:
            self._pool.append(_Worker(self._context))

    def _bury(self, worker: _Worker, task: _Task) -> _Task:
        """Put a new worker in the place of a dead one; returns its task, with one death more, for another try."""
        how = worker.kill()
        self._pool.remove(worker)
        if task.deaths == RETRIES:
            hint = "out of memory, perhaps: with fewer CPUs (taskset) it needs less" if how == "SIGKILL" else None
            who = _name(task.number, task.item)
            raise RunFailed(f"{RETRIES + 1} worker processes died of {how} over {who}", hint)
        self._fill()
        return _Task(task.number, task.item, task.deaths + 1)

    def __enter__(self) -> PoolEngine:
        try:
            self._fill()
        except BaseException:  # a signal, say: the `with` has not begun
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._pool:
            worker.kill()
        self._pool = []


@dataclass(frozen=True, slots=True)
class _Task:
    """An item with its place, and how many workers have died over it."""

    number: int
    item: Any
    deaths: int = 0


class _Worker:
    """A process that runs one task at a time. `knows`: function and shared value that it has been told."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is the end of the pipe
        self.task: _Task | None = None
        self.knows: tuple[Any, Any] | None = None

    def give(self, function: Any, shared: Any, task: _Task) -> bool:
        """Send it a task; False if it is dead."""
        is_known = self.knows is not None and self.knows[0] is function and self.knows[1] is shared
        try:
            if not is_known:
                self.pipe.send((function, shared))
            self.pipe.send((task.item,))
        except OSError:
            return False
        self.knows, self.task = (function, shared), task
        return True

    def kill(self) -> str:
        """End it if it lives; returns how it ended."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(pipe: multiprocessing.connection.Connection, parent: int) -> None:
    """A worker's life: (function, shared) once a map, then (item,) after (item,), each answered with its result."""
    # Signals are for the parent, which then ends its workers. A terminal and Slurm send them to all processes.
    for number in (signal.SIGINT, *leaving_signals()):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    if sys.platform == "linux":
        die_with_parent()
        if os.getppid() != parent:  # gone before it could take effect
            return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for every CPU already
    function: Any = None
    shared: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = pipe.recv()
            if len(message) == 2:
                function, shared = message
            else:
                pipe.send(_apply(function, message[0], shared))


# --- A Ray cluster --------------------------------------------------------------------------------------------------


class RayEngine:
    """Runs tasks on the Ray cluster at an address, one CPU each, spread over its nodes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.workers = 0  # CPUs of the cluster, known once it is open

    def map_ordered(
        self, function: Function[Item, Shared, Result], items: Iterable[Item], shared: Shared
    ) -> Iterator[Result]:
        """Yield `function(item, shared)` of every item, in order.

        Raises:
            RunFailed: the cluster cannot run a task: its worker died again and again, or cannot import our code.
        """
        import ray

        remote = ray.remote(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(_apply_on_ray)
        with signals_wait():
            reference = ray.put(shared)
        numbered = enumerate(items)
        begun: deque[tuple[int, Any, Any]] = deque()
        while True:
            for number, item in itertools.islice(numbered, AHEAD * self.workers - len(begun)):
                with signals_wait():
                    begun.append((number, item, remote.remote(function, item, reference)))
            if not begun:
                return
            number, item, result = begun.popleft()
            try:
                ready: list[Any] = []
                while not ready:
                    with signals_wait():
                        ready, _ = ray.wait([result], timeout=_WAIT_SECONDS)
                with signals_wait():
                    value = ray.get(result)
            except ray.exceptions.RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise RunFailed(f"the Ray cluster cannot run {_name(number, item)}: {lines[0]}", lines[-1]) from error
            yield _opened(value, number, item)

    def __enter__(self) -> RayEngine:
        join_ray(self.address)
        import ray

        self.workers = int(ray.cluster_resources().get("CPU", 0))
        if not self.workers:
            self.__exit__()
            raise UserError(f"{RAY_ADDRESS}={self.address}: the Ray cluster there has no CPU for tasks")
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        print(
            f"Ray at {self.address}: {self.workers} CPUs on {nodes} node{'s' * (nodes > 1)}",
            file=sys.stderr,
            flush=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        with signals_wait():
            ray.shutdown()  # the cluster ends the tasks of a driver that has left


def _apply_on_ray(function: Any, item: Any, shared: Any) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
    return _apply(function, item, shared)


Engine = SerialEngine | PoolEngine | RayEngine


# --- Errors travel as values ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failure:
    """What a task raised, with the text of its traceback, which does not travel."""

    error: BaseException
    traceback: str


def _apply(function: Any, item: Any, shared: Any) -> Any:
    try:
        return function(item, shared)
    except Exception as error:
        text = traceback.format_exc()
        if isinstance(error, RunspecError | OSError):
            return _Failure(error.with_traceback(None), text)
        return _Failure(RuntimeError(f"{type(error).__name__}: {error}"), text)


def _opened(result: Any, number: int, item: Any) -> Any:
    if not isinstance(result, _Failure):
        return result
    if not isinstance(result.error, RunspecError):
        result.error.add_note(f"in {_name(number, item)}:\n{result.traceback}")
    raise result.error


def _name(number: int, item: Any) -> str:
    """What to call an item in an error: its own `name`, else its place."""
    name = getattr(item, "name", None)
    return f"task {number}" if name is None else f"task {number} ({name})"
