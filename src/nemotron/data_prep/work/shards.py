"""Work cut into shards, each done once: a plan frozen on disk, a receipt for every shard, a killed run that goes on.

    plan = Plan(settings={...}, inputs=[...], shards=[Shard("web-00000", Work(...)), ...])
    freeze(plan, folder)
    for receipt, was_done in run_shards(plan, folder, write_shard, shared, engine, Counts):
        ...

`write_shard(shard, shared, output)` is a module's function that runs on a worker of the engine. It writes its files
where `output.path(name)` says and returns its counts, a `Counts`. When it is back, its files are flushed to disk, take
their names in `folder`, and only then the receipt is written: a shard without one is not done, whatever lies there. A
receipt names the plan's digest and the size and sha256 of every file, so that a shard is taken for done only if this
very plan made it and its files are whole.

`Work` and `Counts` are dataclasses whose fields are numbers, strings, lists, dicts, or dataclasses of such; in a `Work`
also paths and tuples.

In `folder`: `plan.json`, `receipts/SHARD.json`, what the shards wrote, and `parts/` while they write.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.secrets import redact
from nemo_runspec.write import write_in_one_step
from nemotron.data_prep.work.engines import Engine

PLAN_FILE, RECEIPTS, PARTS = "plan.json", "receipts", "parts"
Json = Any
"""What `json.dumps` takes."""
Shared = TypeVar("Shared")
Work = TypeVar("Work")
Counts = TypeVar("Counts")


@dataclass(frozen=True, slots=True)
class Shard(Generic[Work]):
    """One unit of work. `name` is unique in its plan and a file name; `work` says what to do."""

    name: str
    work: Work


@dataclass(frozen=True, slots=True)
class InputFile:
    """What tells an input file from another (`uri`) and from its own later self (`size` in bytes, `version`)."""

    uri: str
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[Work]):
    """What is to be done, complete: two plans of one digest write the same bytes.

    `settings`: all that decides about the output, tokenizer digest included. `shards`: the work, in order.
    """

    settings: Mapping[str, Json]
    inputs: Sequence[InputFile]
    shards: Sequence[Shard[Work]]

    def to_json(self) -> dict[str, Json]:
        """As written to plan.json."""
        plan: dict[str, Json] = json.loads(_dump(self))
        return plan

    @property
    def digest(self) -> str:
        """sha256 (hex) of the plan's canonical JSON."""
        return hashlib.sha256(_dump(self, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Size and digest of a file that a task wrote."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Receipt(Generic[Counts]):
    """A shard that is done.

    `plan`: digest; `outputs`: by file name below the folder; `counts`: what the task returned.
    """

    shard: str
    plan: str
    outputs: dict[str, OutputFile]
    counts: Counts


def freeze(plan: Plan, folder: Path) -> None:
    """Write the plan, or find the same one there from a run that was stopped.

    UserError: another plan is there. The message names what differs: an input that changed, came or went, else the
    first setting.
    """
    path = folder / PLAN_FILE
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        now = plan.to_json()
        if before != now:
            raise UserError(f"{path}: {_difference(before, now)}", "--force starts anew; what is done so far is lost")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_in_one_step(path, _dump(plan, indent=1) + "\n")


def run_shards(
    plan: Plan[Work],
    folder: Path,
    function: Callable[[Shard[Work], Shared, ShardOutput], Counts],
    shared: Shared,
    engine: Engine,
    counts: type[Counts],
) -> Iterator[tuple[Receipt[Counts], bool]]:
    """Do the shards of a frozen plan that have no valid receipt yet.

    Yields the receipts of all shards in the plan's order, each with whether it was done before this call. `counts` is
    what `function` returns. Every worker has to see `folder` under this path; on a cluster it lies on the shared file
    system.

    Raises:
        RunFailed: the disk is full, a file cannot be written, or what a worker wrote is not to be seen here.
        Whatever `function` raises. What other shards have done stays done.
    """
    digest = plan.digest
    names = [shard.name for shard in plan.shards]
    if len(set(names)) != len(names):
        raise ValueError("two shards of one name")
    (folder / RECEIPTS).mkdir(parents=True, exist_ok=True)
    # What tasks that were killed left: parts, and a receipt that has not got its name yet.
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    for stray in [*folder.glob(f".{PLAN_FILE}.*"), *(folder / RECEIPTS).glob(".*")]:
        stray.unlink()
    receipts = {shard.name: read_receipt(folder, shard.name, digest, counts) for shard in plan.shards}
    missing = [shard for shard in plan.shards if receipts[shard.name] is None]
    results = engine.map_ordered(_run_shard, missing, (function, shared, folder, digest))
    for shard in plan.shards:
        receipt = receipts[shard.name]
        was_done = receipt is not None
        if receipt is None:
            receipt = next(results)
            for name in receipt.outputs:
                if not (folder / name).is_file():
                    raise RunFailed(
                        f"{folder / name}: written by a worker and not to be seen here",
                        "workers on other machines need the output folder on a shared file system",
                    )
        yield receipt, was_done
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def read_receipt(folder: Path, shard: str, plan_digest: str, counts: type[Counts]) -> Receipt[Counts] | None:
    """The receipt of a shard that this plan made and whose files are all there, byte for byte; else None."""
    try:
        content = json.loads((folder / RECEIPTS / f"{shard}.json").read_text(encoding="utf-8"))
        outputs = restore(dict[str, OutputFile], content["outputs"])
        receipt = Receipt(content["shard"], content["plan"], outputs, restore(counts, content["counts"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if receipt.plan != plan_digest:
        return None
    for name, output in receipt.outputs.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != output.bytes or sha256_file(path) != output.sha256:
            return None
    return receipt


class ShardOutput:
    """Where a task writes. Files take their names when the task is done."""

    def __init__(self, folder: Path, parts: Path) -> None:
        self._folder = folder
        self._parts = parts
        self._names: list[str] = []

    def path(self, name: str) -> Path:
        """Where to write the file that will be `name` (with `/` for folders) below the plan's folder."""
        path = self._parts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name not in self._names:
            self._names.append(name)
        return path

    def commit(self) -> dict[str, OutputFile]:
        """Flush and rename what was written; returns its sizes and digests. A name without a file is left out."""
        outputs: dict[str, OutputFile] = {}
        for name in self._names:
            part, target = self._parts / name, self._folder / name
            if not part.exists():
                continue
            with part.open("rb") as file:
                os.fsync(file.fileno())
            outputs[name] = OutputFile(part.stat().st_size, sha256_file(part))
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        return outputs


def discard(folder: Path) -> None:
    """Delete finished work. What a signal leaves of it is never taken for work to go on with: it has another name."""
    aside = folder.with_name(f"{folder.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def publish_file(path: Path | str, target: Path | str) -> None:
    """Give a file that a shard wrote a second name; a copy where the file system has no links.

    What is done stays where a run that is killed before it has published looks for it.
    """
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _run_shard(shard: Shard[Any], job: tuple[Any, Any, Path, str]) -> Receipt[Any]:
    """A task: one shard from its work to its receipt."""
    function, shared, folder, digest = job
    # A name of its own: after a lost connection Ray may run a task a second time while the first still writes.
    parts = folder / PARTS / f"{shard.name}-{os.getpid()}-{os.urandom(4).hex()}"
    parts.mkdir(parents=True)
    output = ShardOutput(folder, parts)
    try:
        counts = function(shard, shared, output)
        receipt = Receipt(shard.name, digest, output.commit(), counts)
        write_in_one_step(folder / RECEIPTS / f"{shard.name}.json", _dump(receipt, indent=1) + "\n")
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(folder)):
            raise  # about an input
        raise RunFailed(f"{folder}: cannot write: {error.strerror or error}", "the same command goes on") from error
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return receipt


def _difference(before: Mapping[str, Json], now: Mapping[str, Json]) -> str:
    """What is new in a plan, as the end of a sentence."""
    try:
        old, new = ({item["uri"]: item for item in plan["inputs"]} for plan in (before, now))
        for uri in [*new, *old]:
            if uri not in old:
                return f"{redact(uri)} was not there when this run began"
            if uri not in new:
                return f"{redact(uri)} was there when this run began, and is gone"
            if old[uri] != new[uri]:
                return f"{redact(uri)} has changed since this run began"
        for key in now["settings"]:
            if before["settings"].get(key) != now["settings"][key]:
                return f"made with another value of {key}"
    except (KeyError, TypeError, AttributeError):
        return "not a plan of this run"
    return "another division of the same work"


# By hand, since pydantic refuses half a surrogate pair, which JSON can spell: names of files and web pages hold such.


def _dump(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """JSON of dataclasses, paths and what `json.dumps` takes."""
    return json.dumps(value, indent=indent, sort_keys=sort_keys, default=_plain)


def _plain(value: Any) -> Json:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def restore(kind: Any, value: Json) -> Any:
    """What `_dump` wrote of a value of this type. TypeError, KeyError, AttributeError: it is not of it."""
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: restore(types[name], item) for name, item in value.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return [restore(arguments[0], item) for item in value]
    if origin is Counter:
        return Counter(value)
    if origin is dict:
        return {key: restore(arguments[1], item) for key, item in value.items()}
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value
