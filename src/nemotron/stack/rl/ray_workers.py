"""Generation and verification in workers of a Ray, with the results of the trainer's own process, bit for bit.

A worker is a process with a copy of the policy. Before each step it gets the weights, and then its calls (`calls.py`),
each with a seed of its own. It computes on as many threads as the trainer, since on a CPU last bits may depend on
that; a GPU has to be of the same kind.

Ray is the cluster that RAY_ADDRESS names, else one of this machine alone that ends with the run. Which worker does
which call is a function of their numbers. A worker that dies stops the run, which resumes from its last checkpoint.

Simplified against NeMo-RL, where vLLM generates: all weights travel through Ray's object store, once a step and node.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import RunFailed, UserError, leaving_signals
from nemo_runspec.execution.ray.allocation import ray_folder
from nemo_runspec.installation import install_line
from nemo_runspec.user_files import expanded
from nemo_runspec.variables import RAY_ADDRESS
from nemotron.kit.ray_cluster import join_ray, signals_wait
from nemotron.kit.schemas.environments import split_reference
from nemotron.stack.environments import load_environments
from nemotron.stack.environments.sandbox import sandbox_failure
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.rl.calls import Call, Drawn, RolloutSettings, draw_call
from nemotron.stack.training.session import Session
from nemotron.stack.training.threads import fix_order_of_sums

_START_SECONDS = 180.0  # until all workers have imported torch and made their model
_WAIT_SECONDS = 0.2  # for a result, before signals are looked at again
_KEY = "cluster.rollout_workers"


@dataclass(frozen=True)
class Job:
    """What a worker needs beside weights and calls, all of it sent to it: it reads no file but `environments`.

    runs_programs: whether answers are run in `settings.sandbox`. environments: the user's own, family -> FILE.py:NAME.
    """

    model: NemotronHConfig
    tokenizer: str
    settings: RolloutSettings
    environments: Mapping[str, str]
    runs_programs: bool
    bf16: bool
    device: str
    num_threads: int


class Worker:
    """One process, with one model. Its methods are called through Ray."""

    def __init__(self, job: Job) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        fix_order_of_sums()
        torch.set_num_threads(job.num_threads)
        self.job, self.tokenizer = job, Tokenizer.from_str(job.tokenizer)
        self.environments = load_environments(job.environments)
        self.model = NemotronH(job.model).to(job.device).requires_grad_(False).eval()

    def sandbox_failure(self) -> str:
        """Why programs of models cannot be run here, and what to do about it; empty where they can, or need not be."""
        failure = sandbox_failure(self.job.settings.sandbox) if self.job.runs_programs else ""
        return failure and f"{socket.gethostname()}: {failure}"

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Become the policy with these weights."""
        self.model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})

    def draw(self, call: Call) -> Drawn:
        """The rollouts of a call by the weights that were loaded last."""
        own = [replace(task, environment=self.environments.get(task.family)) for task in call.tasks]
        with torch.autocast(self.job.device, torch.bfloat16, enabled=self.job.bf16):
            return draw_call(replace(call, tasks=own), self.model, self.tokenizer, self.job.settings)


@contextlib.contextmanager
def open_workers(count: int, num_calls: int, session: Session, job: Job) -> Iterator[RayWorkers | None]:
    """`count` workers of this rank, until the end of the `with`, for the `num_calls` of a step; None for 0.

    Raises:
        UserError: there are fewer calls than workers; Ray is not installed, cannot be joined or has too few CPUs or
            GPUs; a worker cannot run programs.
        RunFailed: the workers did not start.
    """
    if not count:
        yield None
        return
    if num_calls < count:
        raise UserError(
            f"{_KEY} {count}: a step has work for {num_calls}",
            "a worker draws policy.generation.batch_size completions at once; a smaller one makes work for more",
        )
    with _ray(count, job, session.ranks.world_size):
        workers = RayWorkers(count, job)
        with session.dealt_out():
            workers.start(session.stop.poll)
        yield workers


class RayWorkers:
    """This rank's workers."""

    def __init__(self, count: int, job: Job) -> None:
        import ray

        options = {"num_cpus": job.num_threads, "num_gpus": int(job.device == "cuda"), "scheduling_strategy": "SPREAD"}
        actor = ray.remote(**options)(Worker)
        sent = ray.put(replace(job, environments=_absolute(job.environments)))
        self.workers = [actor.remote(sent) for _ in range(count)]

    def start(self, poll: Callable[[], None]) -> None:
        """Wait until all of them answer, and compare what they can verify with what this process can."""
        deadline = time.monotonic() + _START_SECONDS
        failures = _results([worker.sandbox_failure.remote() for worker in self.workers], poll, deadline)
        if failure := next(filter(None, failures), ""):  # this process can: it would have left out the family otherwise
            raise UserError(*f"a rollout worker on {failure}".split("\n", 1))

    def draw(self, model: NemotronH, calls: Sequence[Call], poll: Callable[[], None]) -> list[Drawn]:
        """What `draw_call` gives for each of `calls` with the weights of `model`.

        Raises what `poll` raises, and RunFailed where a worker failed or died.
        """
        import ray

        # A worker does what it is sent in order: first the weights, from where its node has them in memory.
        weights = ray.put({name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()})
        loaded = [worker.load.remote(weights) for worker in self.workers]
        plain = [replace(call, tasks=[replace(task, environment=None) for task in call.tasks]) for call in calls]
        drawn = [self.workers[number % len(self.workers)].draw.remote(call) for number, call in enumerate(plain)]
        return _results([*loaded, *drawn], poll)[len(loaded) :]


def _results(references: list[Any], poll: Callable[[], None], deadline: float = math.inf) -> list[Any]:
    """The results in order; the first failure that is seen ends the wait."""
    import ray

    waiting = list(references)
    while waiting:
        poll()
        if time.monotonic() > deadline:
            raise RunFailed(f"{_KEY}: not all workers started within {_START_SECONDS:.0f} s")
        ready, waiting = ray.wait(waiting, timeout=_WAIT_SECONDS)
        try:
            ray.get(ready)
        except ray.exceptions.RayError as error:
            poll()  # what stops this process may have ended the worker, too
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise RunFailed(
                f"a rollout worker failed: {shorten(lines[-1], 160)}",
                "the same command resumes from the last checkpoint",
            ) from error
    return list(ray.get(references))


@contextlib.contextmanager
def _ray(count: int, job: Job, world_size: int) -> Iterator[None]:
    """The Ray of RAY_ADDRESS, else one of this machine that ends with the block."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"{_KEY} {count} needs Ray, which is not installed here ({error})", install_line("ray")
        ) from None
    needed = {"CPU": count * job.num_threads, "GPU": count * int(job.device == "cuda")}
    with contextlib.ExitStack() as stack:
        if address := os.environ.get(RAY_ADDRESS):
            join_ray(address)
        elif world_size > 1:
            raise UserError(f"{_KEY} in {world_size} processes needs a Ray cluster in {RAY_ADDRESS}", "run.processes=1")
        else:
            _start_here(needed, stack.enter_context(ray_folder()))
        stack.callback(_leave)
        for resource, number in needed.items():
            if (there := ray.cluster_resources().get(resource, 0)) < number * world_size:
                raise UserError(
                    f"{_KEY} {count} needs {number * world_size} {resource}s of the Ray cluster, which has {there:g}",
                    "a worker takes as many CPUs as the trainer has threads (OMP_NUM_THREADS), and a GPU if it has one",
                )
        yield


def _start_here(needed: Mapping[str, int], folder: Path) -> None:
    """A Ray of this process alone; its sockets need a short path."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Slurm signals all processes of a job, a terminal all of its own. A trainer whose Ray has ended is ended by Ray at
    # once, without a checkpoint, so Ray must not hear them: what is blocked here is blocked in its processes, too.
    told = {signal.SIGINT, *leaving_signals()}
    with signals_wait():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, told)
        try:
            ray.init(
                address="local", num_cpus=needed["CPU"], include_dashboard=False, log_to_driver=False,
                configure_logging=False, _temp_dir=str(folder),
            )  # fmt: skip
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunFailed(f"{_KEY}: Ray did not start on this machine: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave() -> None:
    import ray

    with signals_wait():
        ray.shutdown()  # ends the workers, whatever they are at


def _absolute(environments: Mapping[str, str]) -> dict[str, str]:
    """References whose files are found from the folder of another process, too."""
    found = {}
    for family, reference in environments.items():
        place, name = split_reference(reference)
        found[family] = f"{expanded(place).absolute()}:{name}" if place.endswith(".py") else reference
    return found
