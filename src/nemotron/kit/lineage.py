"""Lineage: every save is tracked, and from any artifact one can walk back to the raw sources that it came from.

The record in the registry is authoritative. Trackers copy it elsewhere: a journal file always, W&B and MLflow if
`set_lineage_tracker` was called. A tracker that fails or hangs costs a warning and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.env.file import tool_table
from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemo_runspec.rules import TEXT, choice

JOURNAL_FILE = "lineage.jsonl"
PROJECT = "nemotron"  # of W&B, and experiment of MLflow, where none is named
_TRACKER_SECONDS = 60.0


class LineageTracker(Protocol):
    """Receives every saved artifact."""

    def saved(self, version: Version) -> None:
        """Record a version that has just been published, without changing it. May raise."""


class FileTracker:
    """One line of JSON for every save, in the order of the saves, in `lineage.jsonl` of the registry.

    A registry behind a URL has it in its local mirror, as nothing can be appended to an object: one journal a machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def saved(self, version: Version) -> None:
        """Append the line in one write, so that processes that save at the same time do not tear each other's."""
        record = version.record
        line = {
            "saved": version.pinned,
            "type": record.get("type"),
            "created_at": record.get("created_at"),
            "producer": record.get("producer"),
            "inputs": record.get("inputs"),
        }
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


class WandbTracker:
    """Mirrors each version as a W&B artifact that refers to the files where they are; inputs become its inputs.

    Uses the W&B run that is open, else opens one in `project`; `mode` is W&B's: online, offline or disabled, where it
    is None that of WANDB_MODE. Needs the extra wandb.
    """

    def __init__(self, project: str = PROJECT, entity: str | None = None, mode: str | None = None) -> None:
        self.options = {"project": project, "entity": entity, "mode": mode}

    def saved(self, version: Version) -> None:
        """Log the artifact `name` with the alias `registry-<version>`, its record as metadata."""
        wandb = _import("wandb")
        run = wandb.run or wandb.init(**self.options, job_type="artifact")
        for pinned in (version.record.get("inputs") or {}).values():
            ref = pinned.partition("@")[0]
            name, _, number = ref.partition(":")
            try:
                run.use_artifact(f"{name}:registry-{number}")
            except Exception as error:  # an input that this project has never seen (or an offline run) is no obstacle
                warn(f"W&B knows no input {ref}: {error}")
        kind = str(version.record.get("type", "artifact"))
        artifact = wandb.Artifact(version.name, type=kind, metadata=version.record)
        if version.registry.is_remote:  # W&B itself may not have the credentials to read it
            artifact.add_reference(version.location, checksum=False)
        else:
            artifact.add_reference(version.path.as_uri(), checksum=True)
        run.log_artifact(artifact, aliases=["latest", f"registry-{version.version}"])


class MlflowTracker:
    """Mirrors each version as an MLflow run: identity and inputs as tags, metrics as metrics, the record as a file.

    Needs the extra mlflow. `tracking_uri` as in MLflow, where it is None that of MLFLOW_TRACKING_URI. A store on this
    machine needs no server: `sqlite:///mlflow.db`, with all of mlflow installed.
    """

    def __init__(self, experiment: str = PROJECT, tracking_uri: str | None = None) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri

    def saved(self, version: Version) -> None:
        """Write one run named `name:version`."""
        mlflow = _import("mlflow")
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_experiment(self.experiment)
        record = version.record
        with mlflow.start_run(run_name=version.ref):
            tags = {"artifact": version.pinned, "type": str(record.get("type", ""))}
            tags |= {f"input.{role}": pinned for role, pinned in (record.get("inputs") or {}).items()}
            mlflow.set_tags(tags)
            numbers = {key: value for key, value in (record.get("metrics") or {}).items() if _is_number(value)}
            if numbers:
                mlflow.log_metrics(numbers)
            mlflow.log_dict(record, "artifact.json")


_WANDB_KEYS = {"project": TEXT, "entity": TEXT, "mode": choice("online", "offline", "disabled")}
_trackers: tuple[LineageTracker, ...] | None = None  # None: not set by the script, so env.toml decides
_silent: list[LineageTracker] = []  # those that did not answer: a job of many saves waits for them once


def set_lineage_tracker(*trackers: LineageTracker) -> None:
    """Set the trackers that get every save from now on, in the place of those set before: all of them in one call.

    `set_lineage_tracker(WandbTracker(), MlflowTracker())`. None of them: the journal file alone, which is always kept.
    """
    global _trackers
    _trackers = trackers


def wandb_settings() -> dict[str, Any] | None:
    """`project`, `entity` and `mode` of W&B as env.toml has them in [tool.wandb]; None where it has no such table."""
    settings = tool_table("wandb", _WANDB_KEYS)
    return None if settings is None else {"project": PROJECT, "entity": None, "mode": None} | settings


def use_configured_tracker() -> None:
    """Set the tracker that env.toml asks for with a table [tool.wandb], unless the script has set its own.

    W&B not being installed costs one line of warning.
    """
    settings = wandb_settings()
    if _trackers is not None or settings is None:
        return
    if importlib.util.find_spec("wandb") is None:
        warn(f"env.toml has a table [tool.wandb], but wandb is not installed: {install_line('wandb')}")
        return
    set_lineage_tracker(WandbTracker(**settings))


def track(version: Version, root: Path) -> None:
    """Tell the journal under `root`, then every tracker, that `version` was published. Never raises, never hangs: a
    tracker that has not answered within a minute is not asked again."""
    for tracker in (FileTracker(root / JOURNAL_FILE), *(_trackers or ())):
        if tracker not in _silent:
            _best_effort(tracker, version)


def _best_effort(tracker: LineageTracker, version: Version) -> None:
    failure: list[BaseException] = []

    def attempt() -> None:
        try:
            tracker.saved(version)
        except BaseException as error:  # a tracker's SystemExit must not end the job either
            failure.append(error)

    thread = threading.Thread(target=attempt, name=f"lineage-{type(tracker).__name__}", daemon=True)
    thread.start()
    thread.join(_TRACKER_SECONDS)
    if thread.is_alive():
        failure.append(TimeoutError(f"no answer for {_TRACKER_SECONDS:.0f} s, it is left out from now on"))
        _silent.append(tracker)
    if failure:
        reason = str(failure[0]).split("\n")[0] or type(failure[0]).__name__
        warn(f"{type(tracker).__name__} failed: {reason}; {version.ref} is recorded locally")


def warn(message: str) -> None:
    """One line on stderr."""
    print(f"warning: {message}", file=sys.stderr)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as `json_text`."""
    path.write_text(json_text(content), encoding="utf-8")


def json_text(content: Any) -> str:
    """`content` as indented JSON with sorted keys, so that equal content gives equal bytes."""
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class RawSource:
    """A leaf of the lineage: raw material that is no artifact."""

    name: str
    sha256: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class LineageNode:
    """One artifact in a lineage.

    `role` is what its consumer calls it (`data`, `model`; None for the start). `problem` says that it is missing,
    corrupt or not the one that was used; a missing one has no type, sources or inputs.
    """

    ref: str
    digest: str
    role: str | None = None
    type: str = ""
    created_at: str = ""
    made_by: str = ""
    sources: tuple[RawSource, ...] = ()
    inputs: tuple[LineageNode, ...] = ()
    problem: str | None = None

    @property
    def note(self) -> str | None:
        """What to know that is no fault: a record that names neither inputs nor sources, as a script may publish."""
        return None if self.problem or self.inputs or self.sources else "origin not stated"


def walk(ref: str, registry: Registry | None = None) -> LineageNode:
    """The tree from an artifact back to its raw sources, as the records have it, each record and digest checked.

    Raises UserError only when `ref` itself cannot be resolved; a problem further up is in the `problem` of its node.
    """
    registry = registry or Registry.default()
    return _node(registry, registry.resolve(ref), None, (), {})


def problems(node: LineageNode) -> list[str]:
    """All problems in a lineage, each once."""
    messages = {each.ref: f"{each.ref}: {each.problem}" for each in iterate(node) if each.problem}
    return list(messages.values())


def raw_sources(node: LineageNode) -> list[RawSource]:
    """All raw sources of a lineage, each once, nearest first."""
    return list(dict.fromkeys(source for each in iterate(node) for source in each.sources))


def iterate(node: LineageNode) -> Iterator[LineageNode]:
    """The node and everything above it, depth first, each artifact once: rounds of data that the model before made
    have exponentially many ways up."""
    seen, ahead = set(), [node]
    while ahead:
        each = ahead.pop()
        if (each.ref, each.digest, each.problem) not in seen:
            seen.add((each.ref, each.digest, each.problem))
            yield each
            ahead += reversed(each.inputs)


def format_lineage(node: LineageNode, *, digits: int = 12) -> list[str]:
    """The tree as lines of text, with `digits` digits of every digest. An artifact is expanded once."""
    return _format(node, "", "", digits, set())


def _node(
    registry: Registry, version: Version, role: str | None, path: tuple[str, ...], known: dict[str, LineageNode]
) -> LineageNode:
    if version.pinned in known:
        return replace(known[version.pinned], role=role)
    record = version.record
    sources = tuple(RawSource(s["name"], s.get("sha256"), s.get("detail")) for s in record.get("sources") or [])
    inputs = []
    for input_role, pinned in (record.get("inputs") or {}).items():
        ref, _, digest = pinned.partition("@")
        try:
            if pinned in path:
                raise UserError("it is an input of itself")
            parent = registry.resolve(pinned)
        except UserError as error:
            inputs.append(LineageNode(ref, digest, input_role, problem=error.message))
        else:
            inputs.append(_node(registry, parent, input_role, (*path, version.pinned), known))
    producer = record.get("producer") or {}
    known[version.pinned] = LineageNode(
        ref=version.ref,
        digest=version.digest,
        role=role,
        type=str(record.get("type", "")),
        created_at=str(record.get("created_at", "")),
        made_by=str(producer.get("name") or producer.get("script") or ""),
        sources=sources,
        inputs=tuple(inputs),
    )
    return known[version.pinned]


def _format(node: LineageNode, first: str, rest: str, digits: int, shown: set[str]) -> list[str]:
    role = f"{node.role}: " if node.role else ""
    line = f"{first}{role}{node.ref}  {node.digest[:digits]}"
    if node.ref in shown:
        return [f"{line}  (see above)"]
    shown.add(node.ref)
    line += f"  {node.type}" if node.type else ""
    line += f"  by {node.made_by}" if node.made_by else ""
    line += f"  ({node.note})" if node.note else ""
    lines = [line]
    if node.problem:
        lines.append(f"{rest}!! {node.problem}")
    below: list[LineageNode | RawSource] = [*node.inputs, *node.sources]
    for number, item in enumerate(below, start=1):
        branch, trunk = ("└─ ", "   ") if number == len(below) else ("├─ ", "│  ")
        if isinstance(item, RawSource):
            parts = (f"source: {item.name}", (item.sha256 or "")[:digits], item.detail)
            lines.append(rest + branch + "  ".join(part for part in parts if part))
        else:
            lines += _format(item, rest + branch, rest + trunk, digits, shown)
    return lines


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(f"{module} is not installed: {install_line(module)}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
