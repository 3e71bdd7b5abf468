"""What a training loop has around it: ranks, records, checkpoints, progress, signals. The loop itself is the script's.

    with open_session(cfg, script=__file__) as session:
        restored = session.begin("pretrain", steps, model, optimizer)
        step = restored.step if restored else 0
        while True:
            with session.head_of_step(step, {"loader": loader.state_dict()}):
                ...                         # validation, rollouts: whatever changes no weight
            if step == session.last_step:
                break
            ...                             # the update
            step += 1

A checkpoint of `step` is the state at the head of step `step`, before its validation. So whatever interrupts that head,
a resumed run begins it again and ends with the weights and the records of a run that nobody touched.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from nemo_runspec.errors import RunFailed
from nemotron.kit.metrics import MetricsLog, Progress
from nemotron.kit.run import Run, open_run
from nemotron.kit.schemas.training import CheckpointConfig
from nemotron.kit.stop import StopFlag, StopRequested
from nemotron.kit.trackers import open_mirrors
from nemotron.stack.models import NemotronH
from nemotron.stack.training.checkpoint import Checkpoints, Restored
from nemotron.stack.training.distributed import Ranks, any_rank, from_rank_0, start_distributed, use_deterministic_cuda
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.precision import multiplies_bf16
from nemotron.stack.training.threads import Threads, fix_order_of_sums, has_fixed_gradients


class SessionConfig(Protocol):
    """What a session reads of a stage's config."""

    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def mixed_precision(
        self,
    ) -> Literal["auto", "fp32", "bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_nvfp4_mixed"]: ...


@contextlib.contextmanager
def open_session(cfg: SessionConfig, script: str | Path) -> Iterator[Session]:
    """Join the other ranks, open the run of `script`, and listen to signals for as long as the `with` block lasts."""
    fix_order_of_sums()
    ranks = start_distributed()
    if ranks.device.type == "cuda":
        use_deterministic_cuda()
    settings = cfg.checkpoint
    with (
        open_run(cfg, script=script) as run,
        full_gpu_in_a_line(),
        StopFlag() as stop,
        Checkpoints(run.dir / "checkpoints", run.fingerprint, settings.keep_last, settings.async_save) as checkpoints,
    ):
        precision = chosen_precision(cfg.mixed_precision, ranks.device, checkpoints if run.resumed else None)
        session = Session(ranks, run, stop, checkpoints, settings.save_interval, precision)
        try:
            yield session
        finally:
            session.threads.end()


@contextlib.contextmanager
def full_gpu_in_a_line() -> Iterator[None]:
    """RunFailed where PyTorch finds no memory on a GPU."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what, ends, _ = str(error).partition(" is free")  # behind it stands what PyTorch itself has
        raise RunFailed(
            what + ends,
            "smaller train.micro_batch_size, policy.train_micro_batch_size or policy.generation.batch_size need less; "
            "the same command goes on from the last checkpoint",
        ) from error


def chosen_precision(mixed_precision: str, device: torch.device, begun: Checkpoints | None = None) -> str:
    """`mixed_precision`; of "auto" what it means: "bf16_mixed" where the processors of all ranks multiply bf16.

    All ranks call it. A run that began with "auto" goes on in the precision that it had, that of its checkpoints in
    `begun`, whatever these processors have.
    """
    if mixed_precision != "auto":
        return mixed_precision
    everywhere = not any_rank(not multiplies_bf16(device))
    state = begun.latest_state() if begun else {}
    return "bf16_mixed" if from_rank_0(int(state.get("bf16", everywhere))) else "fp32"


@dataclass
class Session:
    """One training run as this rank sees it. From `begin` on it also has what is trained, and for how long.

    last_step: the number of updates after which training ends. precision: `mixed_precision`, or what "auto" stands for.
    optimizer: deleted when the head of the last step is left, so that what follows has its memory.
    """

    ranks: Ranks
    run: Run
    stop: StopFlag
    checkpoints: Checkpoints
    save_interval: int
    precision: str
    model: NemotronH = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    last_step: int = field(init=False)
    threads: Threads = field(init=False)
    progress: Progress = field(init=False)
    logs: list[MetricsLog] = field(init=False)

    def __post_init__(self) -> None:
        self.logs = [self.run.metrics]
        self.threads = Threads(1)  # no choice, until `choose_threads`

    @property
    def bf16(self) -> bool:
        """Whether mixed precision is on, FP8 and NVFP4 included."""
        return self.precision != "fp32"

    @property
    def autocast(self) -> torch.autocast:
        """The precision of matrix products: bf16 under mixed precision, but for FP8 and NVFP4 layers, else fp32."""
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16)

    def open_log(self, name: str) -> MetricsLog:
        """A log beside the metrics, `NAME.jsonl`, which `begin` takes back to the checkpoint as well."""
        self.logs.append(self.run.open_log(name))
        return self.logs[-1]

    def begin(self, label: str, steps: int, model: NemotronH, optimizer: torch.optim.Optimizer) -> Restored | None:
        """Begin to train, or go on: a run that was stopped fills `model` and `optimizer` from its newest checkpoint.

        They are what later checkpoints save; `steps` is the last step, unless the stopped run chose another one with
        `end_at`. What was logged after that checkpoint is dropped from all logs: those steps are done again. None
        where there is nothing to resume: a fresh run, or one that was killed before its first checkpoint.
        """
        self.model, self.optimizer = model, optimizer
        restored = self.checkpoints.load_latest(model, optimizer) if self.run.resumed else None
        for index, log in enumerate(self.logs):
            log.truncate(restored.state["num_records"][index] if restored else 0)
        self.last_step = restored.state["last_step"] if restored else steps
        self._note_state()
        if self.ranks.is_main:
            self.run.metrics.mirrors = open_mirrors(self.run, restored.step if restored else 0)
        if restored is not None:
            self.stop.checkpoint = self.checkpoints.last
            if self.ranks.is_main:
                print(f"resumed at step {restored.step} of {self.last_step}", file=sys.stderr)
        peak = measure_peak_flops(self.ranks.device, torch.bfloat16 if self.bf16 else torch.float32)
        self.progress = Progress(
            self.last_step, label=label, start=restored.step if restored else 0,
            peak_flops=peak * self.ranks.world_size,
            stream=sys.stderr if self.ranks.is_main else io.StringIO(),
        )  # fmt: skip
        return restored

    def choose_threads(self, batch_size: int, micro_batch_size: int, seq_len: int, packed: bool = False) -> None:
        """Let the number of threads follow the machine where the results of updates do not depend on it.

        After `begin`, with `model` in training mode, for a loop whose batches all have this shape. RL's have not: it
        stays on the threads that it starts with. Costs a step on each number of threads.
        """
        at_start = torch.get_num_threads()
        if self.ranks.device.type != "cpu" or self.ranks.world_size > 1 or at_start == 1:
            return
        rows = {min(micro_batch_size, batch_size), batch_size % micro_batch_size} - {0}
        if all(has_fixed_gradients(self.model, (n, seq_len), packed, self.autocast) for n in rows):
            self.threads = Threads(at_start)

    def end_at(self, step: int) -> None:
        """Make `step` the last one. All ranks call it, in the head of a step that is not after it."""
        self.last_step = self.progress.total = step
        self._note_state()

    def progress_of_pass(self, label: str, rows: int) -> Progress:
        """A line about a pass over `rows` rows, this rank's share, where it takes long; rank 0 shows it.

        Nobody closes it: on a terminal the line of the training takes its place.
        """
        stream = sys.stderr if self.ranks.is_main else io.StringIO()
        return Progress(rows, label=label, only_if_slow=True, stream=stream)

    def _note_state(self) -> None:
        if self.ranks.is_main:
            self.run.write_state("running", last_step=self.last_step, precision=self.precision)

    @contextlib.contextmanager
    def head_of_step(
        self, step: int, state: Mapping[str, Any], tensors: Callable[[], Mapping[str, torch.Tensor]] = dict
    ) -> Iterator[None]:
        """Around the part of a step that changes no weight, after `step` updates: save, then leave if a signal came.

        A checkpoint is saved first where one is due: every `save_interval` steps and at the last. One is also saved
        when a signal came before the block or in it, and when the block made this step the last one. All ranks enter
        it together. `tensors` gives the loop's own ones; all ranks call it when a checkpoint is saved.
        """
        self.threads.end()
        records = [log.num_records for log in self.logs]
        state = {**state, "last_step": self.last_step, "bf16": self.bf16, "num_records": records}

        def save() -> None:  # nothing, where it is on disk already
            self.stop.checkpoint = self.checkpoints.save(step, self.model, self.optimizer, state, tensors())

        if step > 0 and (step % self.save_interval == 0 or step == self.last_step):
            save()
        try:
            self.poll()
            yield
        except StopRequested:
            save()
            raise
        if step == self.last_step:
            save()
            self.checkpoints.give_copies_back()
            del self.optimizer
        else:
            self.threads.begin()

    def poll(self) -> None:
        """Raise StopRequested on every rank if a signal has come to one of them. All ranks call it equally often."""
        if any_rank(self.stop.received is not None):
            raise StopRequested(self.stop.received or signal.SIGTERM)

    @contextlib.contextmanager
    def dealt_out(self) -> Iterator[None]:
        """Around work of which each rank does a share of its own, polling `stop` alone: all ranks leave it together.

        A rank that a signal reaches leaves its share at once; the others learn of it when they have done theirs. No
        collective may stand in the block.
        """
        with contextlib.suppress(StopRequested):
            yield
        self.poll()
