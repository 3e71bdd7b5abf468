"""Metrics elsewhere: what is written to metrics.jsonl also goes to W&B, MLflow, trackio and TensorBoard.

Best effort: each tracker works on a thread of its own, behind a queue. One that fails, or does not answer, costs one
line of warning; the run goes on, and metrics.jsonl has everything.

A run that is resumed goes on in the same run of the tracker, whose id lies in the run's directory. It logs the steps
after its checkpoint again, with the same numbers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from nemo_runspec.env.roots import output_root
from nemo_runspec.installation import install_line
from nemotron.kit.lineage import wandb_settings, warn
from nemotron.kit.metrics import numbers_in
from nemotron.kit.run import Run

_MLFLOW_PARAM_LENGTH = 6000
_MLFLOW_BATCH = 100  # parameters a request, at most


class Tracker(Protocol):
    """Takes the metrics of one run. Its methods are called on one thread, and may raise."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Take the numbers of `step`, logged at `time` (seconds since the epoch)."""

    def close(self, finished: bool) -> None:
        """Send what is left. `finished` False: the run failed or was stopped, and may be resumed."""


class Mirror:
    """One tracker behind a queue. `name` is what warnings call it; `open_tracker` is called on the tracker's thread."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self._open_tracker = open_tracker
        self._waiting: queue.SimpleQueue[dict[str, Any] | bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def log(self, record: dict[str, Any]) -> None:
        """Pass on one record of metrics.jsonl. Returns at once."""
        if self._thread.is_alive():
            self._waiting.put(record)

    def close(self, finished: bool) -> None:
        """Tell the tracker to send what is left. Returns at once."""
        self._waiting.put(finished)

    def wait(self, seconds: float) -> None:
        """Wait until the tracker has taken everything, `seconds` at most."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            warn(f"{self.name} did not answer before the run ended; metrics.jsonl has all metrics")

    def _work(self) -> None:
        try:
            tracker = self._open_tracker()
            while not isinstance(record := self._waiting.get(), bool):
                values = numbers_in(record)
                step, time = int(values.pop("step")), values.pop("time")
                tracker.log(step, time, {name.replace(".", "/"): value for name, value in values.items()})
            tracker.close(record)
        except BaseException as error:  # a library's SystemExit must not end the thread without a word either
            reason = str(error).split("\n")[0] or type(error).__name__
            warn(f"{self.name} takes no metrics: {reason}; metrics.jsonl has them")


def open_mirrors(run: Run, start: int) -> list[Mirror]:
    """The trackers that the config's `logger` group asks for, and [tool.wandb] of env.toml.

    Args:
        start: the step that the run goes on from, 0 for a fresh one.
    """
    logger = run.config.get("logger") or {}
    wandb = {**(wandb_settings() or {})}
    if logger.get("wandb_project"):
        wandb |= {"project": logger["wandb_project"], "entity": logger.get("wandb_entity") or wandb.get("entity")}
    mirrors: list[tuple[str, str, Any, Callable[[], Tracker]]] = [
        ("W&B", "wandb", wandb, lambda: WandbMetrics(run, wandb, logger.get("wandb_exp_name"))),
        ("MLflow", "mlflow", logger.get("mlflow_experiment"), lambda: MlflowMetrics(run, logger)),
        ("trackio", "trackio", logger.get("trackio_project"), lambda: TrackioMetrics(run, logger["trackio_project"])),
        ("TensorBoard", "tensorboard", logger.get("tensorboard_dir"), lambda: TensorBoardMetrics(run, logger, start)),
    ]
    opened = []
    for name, library, wanted, open_tracker in mirrors:
        if wanted and importlib.util.find_spec(library) is None:
            warn(f"{name} takes no metrics: {library} is not installed: {install_line(library)}")
        elif wanted:
            opened.append(Mirror(name, open_tracker))
    return opened


def run_label(run: Run) -> str:
    """What a tracker calls the run: `nano3/sft/tiny-5fd3190846`."""
    return f"{run.name}/{run.dir.name}"


def remembered_id(run: Run, tracker: str, new: Callable[[], str]) -> str:
    """The id of the tracker's run; made by `new` for a fresh run, else that of the attempt before."""
    path = run.dir / f"{tracker}.id"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8").strip()
    made = new()
    path.write_text(f"{made}\n", encoding="utf-8")
    return made


def _random_id() -> str:
    return uuid.uuid4().hex[:12]


class WandbMetrics:
    """A run of W&B, with the resolved config. Artifacts that are published while it is open are logged by it.

    settings: `project`, and `entity` and `mode` (online, offline, disabled) where they are known.
    """

    def __init__(self, run: Run, settings: Mapping[str, Any], label: str | None) -> None:
        import wandb

        self.run = wandb.init(
            **settings, id=remembered_id(run, "wandb", _random_id), resume="allow", name=label or run_label(run),
            job_type=run.name, config=run.config, dir=str(run.dir),
        )  # fmt: skip

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the numbers; W&B takes no step that is before its last one."""
        if step >= self.run.step:
            self.run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        """Finish the run, as failed where it may be resumed."""
        self.run.finish(exit_code=0 if finished else 1)


class MlflowMetrics:
    """A run in the experiment `mlflow_experiment`; the config is its parameters."""

    def __init__(self, run: Run, logger: Mapping[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Param

        self.client = mlflow.MlflowClient(tracking_uri=logger.get("mlflow_tracking_uri"))
        known = self.client.get_experiment_by_name(logger["mlflow_experiment"])
        experiment = known.experiment_id if known else self.client.create_experiment(logger["mlflow_experiment"])
        label = logger.get("mlflow_run_name") or run_label(run)
        fresh = not (run.dir / "mlflow.id").exists()
        self.id = remembered_id(run, "mlflow", lambda: self.client.create_run(experiment, run_name=label).info.run_id)
        if fresh:
            values = [Param(key, str(value)[:_MLFLOW_PARAM_LENGTH]) for key, value in _leaves(run.config).items()]
            for begin in range(0, len(values), _MLFLOW_BATCH):
                self.client.log_batch(self.id, params=values[begin : begin + _MLFLOW_BATCH])
        else:
            self.client.update_run(self.id, status="RUNNING")

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the numbers, in names of the characters that MLflow takes."""
        from mlflow.entities import Metric

        taken = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        self.client.log_batch(self.id, [Metric(name, value, round(time * 1000), step) for name, value in taken.items()])

    def close(self, finished: bool) -> None:
        """End the run."""
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


class TrackioMetrics:
    """A run of trackio, on this machine; TRACKIO_SPACE_ID sends it to a Space of the Hub."""

    def __init__(self, run: Run, project: str) -> None:
        import trackio

        name = f"{run_label(run)}-{remembered_id(run, 'trackio', _random_id)}"
        self.run = trackio.init(project=project, name=name, resume="allow", config=run.config)

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log the numbers."""
        self.run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        """Finish the run."""
        self.run.finish()


class TensorBoardMetrics:
    """An event file in `tensorboard_dir`/<name of the run>; a relative `tensorboard_dir` is below the output root."""

    def __init__(self, run: Run, logger: Mapping[str, Any], start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self.writer = EventFileWriter(str(output_root() / Path(logger["tensorboard_dir"]) / run_label(run)))
        # TensorBoard drops what an earlier attempt logged from this step on: all that comes after the checkpoint.
        again = start + 1 if start else 0
        self.writer.add_event(Event(step=again, session_log=SessionLog(status=SessionLog.START)))

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Write one event."""
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.add_event(self._event(step=step, wall_time=time, summary=self._summary(value=entries)))

    def close(self, finished: bool) -> None:
        """Write what is buffered."""
        self.writer.close()


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested groups under dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
