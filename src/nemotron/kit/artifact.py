"""Artifact types: what one step passes to the next. A recipe may subclass any of them for its own kind.

dataset = Dataset(path=out, num_examples=n, train_path=out / "train.jsonl")
dataset.save()                                      # the next version of the run's `run.output`; without a run, of
                                                    # the script's name and "data"
checkpoint = Checkpoint.load()                      # from the pipe, or load("name:3"), or load("/a/path")
dataset = Dataset.load(path=checkpoint.dataset_path)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

from nemo_runspec.artifacts import Registry, Version, parse_reference
from nemo_runspec.artifacts.manifest import MANIFEST_FILE, RECORD_FILE, list_files, payload_digest, sha256_file
from nemo_runspec.artifacts.naming import SCHEME, encode_path
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse as parse_runspec
from nemotron.kit import lineage, payloads
from nemotron.kit.chat_templates import is_path
from nemotron.kit.environment import describe_environment
from nemotron.kit.pipes import piped, read_pipe
from nemotron.kit.producer import Producer, producer_of
from nemotron.kit.run import (
    CODE_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    PHASES_FILE,
    Run,
    add_input,
    current_run,
)
from nemotron.kit.scale import SCALES, apply_scale


class Source(BaseModel):
    """Raw material that is no artifact: a user's file, an interpreter's library, a generator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    detail: str | None = None


AnyArtifact = TypeVar("AnyArtifact", bound="Artifact")


@dataclasses.dataclass
class _Script:
    """The script that saves when no run is open, and what it has loaded so far. `file`: None for this process's own."""

    file: Path | None = None
    loaded: dict[str, Version] = dataclasses.field(default_factory=dict)
    folders: dict[Path, Source] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.file or Path(sys.argv[0])


_scripts = [_Script()]  # above the process's own those of `script_scope`
_MOST_NAMES = 100  # whose records are read for a hint


@contextlib.contextmanager
def script_scope(script: Path) -> Iterator[None]:
    """In it, and outside a run, `script` is what saves, with its own inputs: a step that another script calls."""
    _scripts.append(_Script(script))
    try:
        yield
    finally:
        _scripts.pop()


def _in_step() -> bool:
    """Whether a step saves (`script_scope`): what it loads means the same in a run of its own as without one."""
    return _scripts[-1].file is not None


def _run_here() -> Run | None:
    """The open run, unless this is a step of another script than the run's, which that one calls: it is in none."""
    run = current_run()
    return None if run is None or _scripts[-1].file not in (None, run.spec.script_path) else run


def _source(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _template(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and is_path(value) else value


# A family's chat template by name, or the folder of one in a payload (`kit.chat_template.keep_template`).
ChatTemplate = Annotated[str | Path, BeforeValidator(_template)]


class Artifact(BaseModel):
    """Base of all types. Unknown fields are errors; fields of type Path may lie in the payload or in another artifact.

    `metrics` go into the record, not into the payload, and so not into the payload digest. `sources` list what raw
    material went in, as `Source`s or plain names; files of the inputs are none.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    path: Path
    metrics: dict[str, JsonValue] = {}
    sources: list[Annotated[Source, BeforeValidator(_source)]] = []
    _version: Version | None = PrivateAttr(default=None)

    def save(
        self, name: str | None = None, run: Run | None = None, *, move: bool = False, registry: Registry | None = None
    ) -> Self:
        """Publish as the next version of `name`, and point `path` and the other paths at what was published.

        Inputs are what the run (without one, this process) has loaded, and the artifacts that fields point into. A run
        that goes on, and was stopped after it had published the same payload, gets that version.

        Args:
            name: default: `run.output` of the run's config, `run.results` for Results; without a run, the script's
                name and what it is: `train-model` of train.py.
            run: whose inputs and identity go into the record; default: the run that `open_run` opened.
            move: do not copy the payload but move it (same file system: no second copy on disk).
            registry: where it is published; default: that of the run, without one `Registry.default()`.

        Raises UserError when there is no payload, or one that is not of this type (weights that are not finite, data
        without a record), or a path field names nothing; RunFailed on a full disk.
        """
        run = run or _run_here()
        if run is not None and run.rank != 0:
            raise RuntimeError(f"rank {run.rank} saves an artifact; only rank 0 may, or there are as many as processes")
        name = name or (run.artifact_name(isinstance(self, Results)) if run else _default_name(self.role()))
        if name is None:
            raise UserError(f"{type(self).__name__}.save() has no name", "set run.output in the config, or pass a name")
        registry = registry or (run.registry if run else Registry.default())
        self._prepare()
        for field, path in self._paths().items():
            _check_path(f"{type(self).__name__}.{field}", path)
        if self.path.exists():  # else the registry says so
            try:
                self._check()
            except UserError as error:
                raise error.at(f"{name} is not published") from None
        base = self.path if self.path.is_dir() else self.path.parent
        record = self._record(base, registry, run)
        again = run is not None and run.resumed
        version = registry.publish(name, self.path, record, move=move, run_files=_run_files(run), once=again)
        for field in self._paths():
            setattr(self, field, version.record["fields"][field])
        self._version = version
        if run is None or not run.has_noted(version):  # else an attempt before this one has come so far
            lineage.track(version, registry.local_root)
        if run is not None:
            run.note_published(version)
        return self

    @classmethod
    def load(cls, ref: str | Path | None = None, *, path: Path | str | None = None, key: str | None = None) -> Self:
        """Load an artifact of this type, every byte of it checked, and note it as an input of the current run.

        Args:
            ref: a reference (`name`, `name:3`, `art://name:3`) or a path; without it (and without `path`) the
                artifact of this type that the script before in the pipe handed over.
            path: a payload directory, or something in one.
            key: which one of the pipe's artifacts, when several are of this type.

        Raises UserError when there is none, when it is of another type, or when it is corrupt.
        """
        if isinstance(ref, Path) or (isinstance(ref, str) and "/" in ref.removeprefix(SCHEME)):
            path, ref = ref, None
        if path is not None:
            return cls._at(Path(path))
        if ref is None:
            return cls._from_pipe(key)
        return cls.from_uri(str(ref))

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Load `art://name`, `art://name:latest` or `art://name:3`; as `load`."""
        run = current_run()
        return cls._of_version((run.registry if run else Registry.default()).resolve(uri))

    @property
    def version(self) -> Version:
        """The published version behind this artifact; ValueError if it was neither saved nor loaded."""
        if self._version is None:
            raise ValueError(f"this {type(self).__name__} has not been saved")
        return self._version

    @property
    def ref(self) -> str:
        """`name:3`."""
        return self.version.ref

    @property
    def uri(self) -> str:
        """`art://name:3`."""
        return self.version.uri

    @property
    def digest(self) -> str:
        """The payload digest, 64 hex digits."""
        return self.version.digest

    @property
    def producer(self) -> Producer:
        """What made it."""
        return Producer.model_validate(self.version.record["producer"])

    @property
    def created_at(self) -> datetime.datetime:
        """When it was published, in UTC."""
        return datetime.datetime.fromisoformat(self.version.record["created_at"])

    @property
    def inputs(self) -> dict[str, str]:
        """What it was made from: role -> `name:version@digest`."""
        return dict(self.version.record["inputs"])

    @classmethod
    def input_of(cls, made: Artifact) -> Self:
        """Load the artifact of this type's role that `made` was made from: `Checkpoint.input_of(results)`.

        It is looked for where `made` lies, whatever the registry of this folder has under the same name. UserError
        where the record of `made` names none, and where what lies there is another.
        """
        if cls.role() not in made.inputs:
            raise UserError(f"{made.ref} was not made from a {cls.__name__}", f"it was from {made.inputs or 'nothing'}")
        return cls._of_version(made.version.registry.resolve(made.inputs[cls.role()]))

    @classmethod
    def role(cls) -> str:
        """What it is to the step that reads it: `data`, `model`, `results`; of another type its name."""
        return cls.__name__.lower()

    def _prepare(self) -> None:
        """Complete the payload before it is published."""

    def _check(self) -> None:
        """UserError where the payload is not what this type stands for."""

    def _paths(self) -> dict[str, Path]:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in fields.items() if isinstance(value, Path)}

    def _record(self, base: Path, registry: Registry, run: Run | None) -> dict[str, Any]:
        root = registry.local_root
        inputs = self._inputs(registry, run)
        payloads = [version.path for version in inputs.values()]
        sources = self.sources + ([] if run and not _in_step() else [*_scripts[-1].folders.values()])
        raw = [source for source in sources if not any(map(Path(source.name).is_relative_to, payloads))]
        paths = {field: encode_path(path, base, root) for field, path in self._paths().items()}
        fields = self.model_dump(mode="json", exclude={"metrics", "sources"}) | paths
        for name, value in fields.items():
            if _without_nan(value) != value:
                raise UserError(f"{type(self).__name__}.{name} is {value}: a field is a finite number")
        return {
            "type": type_name(type(self)),
            "types": [type_name(cls) for cls in type(self).__mro__ if issubclass(cls, Artifact)],
            "fields": fields,
            "metrics": _without_nan(self.metrics),
            "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "producer": (run.producer() if run else producer_of(_scripts[-1].path)).model_dump(mode="json"),
            "inputs": {role: version.pinned for role, version in inputs.items()},
            "sources": [source.model_dump(mode="json", exclude_none=True) for source in raw],
        }

    def _inputs(self, registry: Registry, run: Run | None) -> dict[str, Version]:
        """What was loaded, and the published payloads that fields point into, by role."""
        inputs = dict(run.inputs if run else _scripts[-1].loaded)
        for field, path in self._paths().items():
            inside = path.absolute()
            if inside.is_relative_to(registry.local_root):
                try:
                    version = registry.version_at(inside)
                except UserError as error:
                    lineage.warn(f"{field} is not among the inputs: {error.message}")
                    continue
                add_input(inputs, version, field.removesuffix("_path"))
        return inputs

    @classmethod
    def _at(cls, path: Path) -> Self:
        """What was published with `path` in it."""
        return cls._of_version(_version_at(path))

    @classmethod
    def _of_version(cls, version: Version) -> Self:
        record = version.record
        if type_name(cls) not in record.get("types", []):
            others = _names_of(cls, version.registry)
            raise UserError(
                f"{version.ref} is of type {record.get('type')}, not {cls.__name__}",
                f"give one of {', '.join(others)}" if others else None,
            )
        run = _run_here()
        if run is not None:
            run.add_input(version, cls.role() if _in_step() and cls.role() not in run.inputs else None)
        else:
            version.registry.resolve_verified(version.ref)
        kind: type[Self] = next((sub for sub in _subclasses(cls) if type_name(sub) == record["type"]), cls)
        if run is None:
            add_input(_scripts[-1].loaded, version, kind.role())
        # A recipe's own kind, loaded where its class is not imported, comes as the type that was asked for.
        values = {name: value for name, value in record["fields"].items() if name in kind.model_fields}
        try:
            artifact = kind(**values, metrics=record["metrics"], sources=record["sources"])
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{version.ref} does not fit {kind.__name__}: {field}: {first['msg']}") from error
        artifact._version = version
        return artifact

    @classmethod
    def _from_pipe(cls, key: str | None) -> Self:
        references = read_pipe()
        if not references and piped():
            raise UserError(f"no {cls.__name__} came through the pipe", "the script before it failed: see its message")
        if not references:
            raise UserError(f"no {cls.__name__} given and nothing on stdin", "pass a reference, or a pipe")
        if key is not None and key not in references:
            raise UserError(f"the pipe has no '{key}'", f"it has {', '.join(references)}")
        run = current_run()
        registry = run.registry if run else Registry.default()
        versions = {role: registry.resolve(ref) for role, ref in references.items() if key in (None, role)}
        fits = {
            role: version for role, version in versions.items() if type_name(cls) in version.record.get("types", [])
        }
        if key is None and len(fits) != 1:
            listed = ", ".join(f"{role} ({version.record.get('type')})" for role, version in versions.items())
            raise UserError(f"the pipe has {len(fits)} of type {cls.__name__}: {listed}", "name one: load(key=…)")
        return cls._of_version(next(iter(versions.values() if key else fits.values())))


class Dataset(Artifact):
    """Data that a training, alignment or evaluation step reads."""

    num_examples: int | None = Field(ge=1, description="documents, conversations or prompts in it; null: not counted")
    train_path: Path | None = Field(default=None, description="file, folder or bin/idx prefix to train on")
    valid_path: Path | None = Field(default=None, description="held out, looked at while training")
    test_path: Path | None = Field(default=None, description="held out, looked at at the end")
    tokenizer_path: Path | None = Field(default=None, description="folder in Hugging Face layout")
    num_tokens: int | None = Field(default=None, ge=0, description="tokens to train on")

    @classmethod
    def role(cls) -> str:
        """`data`."""
        return "data"

    def at_scale(self, count: int, scale: str | None) -> int:
        """How many of `count` of its records a step at `scale` reads: the share that it is of the scale of this data.

        All of them without a scale, or at one that is no smaller; else what `apply_scale` gives of as many as there
        would be in full. At least 1. Data that does not say its scale is full.
        """
        there = str(self.metrics.get("scale", "full"))
        if scale is None or SCALES[scale] >= SCALES[there]:
            return max(1, count)
        return min(count, apply_scale(count * 100 // SCALES[there], scale))

    @classmethod
    def _at(cls, path: Path) -> Self:
        """Also, outside a run or in a step, a folder that was never published: raw material, noted with its digest."""
        strict = _run_here() is not None and not _in_step()
        if cls is not Dataset or strict or not path.is_dir() or _published_at(path):
            return super()._at(path)
        folder = path.absolute()
        files = {name: sha256_file(folder / name) for name in list_files(folder)}
        if not files:
            raise UserError(f"{path} holds no data")
        _scripts[-1].folders[folder] = Source(name=str(folder), sha256=payload_digest(files), detail="a folder")
        return cls(path=folder, num_examples=None)

    def _check(self) -> None:
        for field in ("train_path", "valid_path", "test_path"):
            if (path := getattr(self, field)) is not None:
                payloads.check_not_empty(f"{type(self).__name__}.{field}", path)


class PretrainBlend(Dataset):
    """Megatron .bin/.idx token streams and the weights with which they are mixed, phase by phase."""

    blend_path: Path | None = Field(default=None, description="JSON: phases, data sets, weights, realised mixture")

    def _check(self) -> None:
        super()._check()
        payloads.check_token_streams(self.path)


class SFTPack(Dataset):
    """Conversations packed into rows of `seq_len` tokens: Parquet with input_ids, loss_mask, seq_start_id."""

    seq_len: int = Field(ge=1, description="tokens a row")
    num_loss_tokens: int | None = Field(default=None, ge=0, description="tokens that count in the loss")
    chat_template: ChatTemplate = Field(description="template under which the conversations were tokenised")
    reasoning: bool | None = Field(default=None, description="whether most answers in it come after reasoning")

    def _check(self) -> None:
        super()._check()
        payloads.check_columns(self.train_path or self.path, ("input_ids", "loss_mask", "seq_start_id"))


class RLPrompts(Dataset):
    """Prompts with what it takes to verify an answer: JSONL of tasks."""

    families: list[str] = Field(default=[], description="environment families in it")

    def _check(self) -> None:
        super()._check()
        if self.train_path is not None and self.train_path.is_file():
            payloads.check_first_record(self.train_path, ())


class Preferences(Dataset):
    """Pairs of a chosen and a rejected answer to the same prompt: JSONL."""

    def _check(self) -> None:
        super()._check()
        if self.train_path is not None and self.train_path.is_file():
            payloads.check_first_record(self.train_path, ("chosen", "rejected"))


class Checkpoint(Artifact):
    """Weights at the end of a training step, with references to the data that they were trained on."""

    num_steps: int = Field(ge=0, description="optimizer steps")
    training_loss: float | None = Field(default=None, description="mean of the last steps, nats a token")
    checkpoint_path: Path | None = Field(default=None, description="folder of the weights; default: the payload")
    tokens: int | None = Field(default=None, ge=0, description="tokens trained on")
    dataset_path: Path | None = Field(default=None, description="payload of the data set that it was trained on")
    tokenizer_path: Path | None = Field(default=None, description="folder in Hugging Face layout")
    chat_template: ChatTemplate | None = Field(
        default=None, description="template that it answers under; none: a base model"
    )
    reasoning: bool | None = Field(
        default=None, description="whether it was trained to reason before it answers, and so is asked; none: not known"
    )

    @classmethod
    def role(cls) -> str:
        """`model`."""
        return "model"

    def _check(self) -> None:
        payloads.check_not_empty(f"{type(self).__name__}.path", self.path)
        payloads.check_weights(self.path)

    @property
    def template(self) -> str | None:
        """`chat_template` as `kit.chat` takes it."""
        return None if self.chat_template is None else str(self.chat_template)


class Model(Checkpoint):
    """A model to use: config.json, model.safetensors and tokenizer in Hugging Face layout."""

    exported_path: Path | None = Field(default=None, description="payload of the artifact that it was exported from")

    num_parameters: int | None = Field(default=None, ge=1)

    def _check(self) -> None:
        super()._check()
        if not any(self.path.glob("*.safetensors")) or not (self.path / "config.json").is_file():
            raise UserError(f"{self.path}: not a model in Hugging Face layout", "config.json and *.safetensors in it")


class QuantizedModel(Model):
    """A model whose weights are codes and scales, as ModelOpt exports them; `num_parameters` counts values."""

    quant_algo: str = Field(description="format, in ModelOpt's words; MIXED_PRECISION where layers have several")
    full_path: Path = Field(description="payload of the model that was quantised, and that QAD learns from")


def _fresh_results_dir() -> Path:
    folder = _run_results_dir()
    if folder is None:
        raise UserError("Results needs path=: no run is open that could provide a folder")
    folder.mkdir(exist_ok=True)
    return folder


class Results(Artifact):
    """What an evaluation measured, in `metrics`. A folder without files gets them as `results.json`, its only file.

    They are content then: leave out wall times, so that the same evaluation twice has the same payload digest.
    """

    path: Path = Field(default_factory=_fresh_results_dir)

    @classmethod
    def role(cls) -> str:
        """`results`."""
        return "results"

    def _prepare(self) -> None:
        target = self.path / "results.json"
        if self.path == _run_results_dir() or (self.path.is_dir() and not list_files(self.path)):
            lineage.write_json(target, _without_nan(self.metrics))


def _run_results_dir() -> Path | None:
    run = current_run()
    return run.dir / "out-results" if run else None


def type_name(cls: type[Artifact]) -> str:
    """What a record calls a type: those of this module by their bare name, others as `module.Class`.

    Two recipes may so each have a `Checkpoint` of their own. The module of a class in a script that runs is the one
    that others would import.
    """
    if cls.__module__ == Artifact.__module__:
        return cls.__name__
    module = cls.__module__
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        script = Path(file).absolute()
        parts = [script.stem]
        for folder in script.parents:
            if not (folder / "__init__.py").is_file():
                break
            parts.insert(0, folder.name)
        module = ".".join(parts)
    return f"{module}.{cls.__qualname__}"


def _default_name(role: str) -> str:
    """The name of what a script saves outside a run: its own, as its block or its file says, and the role.

    A step that a run of another script calls takes over what that one's config adds: `nano2-rl-model-smoke` of the
    script nano2/rl makes its steps' models end in `-smoke`, too.
    """
    script = _scripts[-1].path
    name = script.stem if script.suffix == ".py" else ""
    with contextlib.suppress(UserError):
        name = parse_runspec(script).name.replace("/", "-") if name else ""
    ending = ""
    if (caller := current_run()) is not None:
        own = re.escape(caller.spec.name.replace("/", "-"))
        added = re.fullmatch(rf"{own}-[a-z]+(-.+)", caller.artifact_name() or "")
        ending = added[1] if added else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{role}{ending}").strip("-.")


def _run_files(run: Run | None) -> dict[str, bytes]:
    """Config, metrics and environment of the run, as far as there are; outside a run, the environment alone."""
    if run is None:
        return {ENVIRONMENT_FILE: lineage.json_text(describe_environment()).encode()}
    files = {name: run.dir / name for name in (CONFIG_FILE, METRICS_FILE, PHASES_FILE, ENVIRONMENT_FILE, CODE_FILE)}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def _subclasses(cls: type[AnyArtifact]) -> list[type[AnyArtifact]]:
    direct = cls.__subclasses__()
    return direct + [sub for each in direct for sub in _subclasses(each)]


def _names_of(cls: type[Artifact], registry: Registry) -> list[str]:
    """Names of the artifacts of this machine whose latest version is of the type, some of them at most."""
    names = []
    for name in registry.names()[:_MOST_NAMES]:
        try:
            if type_name(cls) in registry.resolve(name).record.get("types", []):
                names.append(name)
        except UserError:  # a damaged artifact is not proposed
            continue
    return names


def _check_path(what: str, path: Path) -> None:
    """A path field names a file or folder, or the common prefix of files (`train` for train.bin and train.idx)."""
    if not path.exists() and not any(path.parent.glob(f"{path.name}*")):
        raise UserError(f"{what}: {path} does not exist")


def _version_at(path: Path) -> Version:
    version = _published_at(path)
    if version is None:
        hint = f"make it one: nemotron artifacts add {path}" if path.is_dir() else "there is no such directory"
        raise UserError(f"{path.absolute()} is not in a published artifact", hint)
    return version


def _published_at(path: Path) -> Version | None:
    """The version whose folder is around `path`; None where there is none."""
    path = path.absolute()
    run = current_run()
    registry = run.registry if run else Registry.default()
    if registry.is_remote and path.is_relative_to(registry.local_root):  # perhaps nothing of it was fetched yet
        return registry.version_at(path)
    for folder in (path, *path.parents):
        if (folder / RECORD_FILE).is_file() and (folder / MANIFEST_FILE).is_file():
            registry = Registry(folder.parents[1])
            return registry.resolve(str(parse_reference(f"{folder.parent.name}:{folder.name}")))
    return None


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null takes their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value
