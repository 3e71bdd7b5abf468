"""Every knob of `tokenize_documents.py`, and the blend files that may stand in for its sources."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.user_files import expanded, no_such_file
from nemotron.kit.schemas import sources as shared
from nemotron.kit.schemas.group import Seed
from nemotron.kit.schemas.sources import (
    PhaseConfig,
    SourcesConfig,
    SourcesRunConfig,
    check_phase_ends,
    check_weights,
    name_of,
    named,
)


class RunConfig(SourcesRunConfig):
    """Names of what is read and written."""

    data: str | None = Field(None, description="artifact with documents, for ${art:data,train_path} in a path")


class SourceConfig(shared.SourceConfig):
    """A source: documents that get a weight together. A path alone may stand for it."""

    fields: ClassVar[tuple[str, ...]] = ("text",)
    other_names: ClassVar[dict[str, str]] = shared.SourceConfig.other_names | {
        "text_field": "columns: {text: …}",
        "max_examples": "max_documents",
    }

    repeats: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="epochs of it at most; a blend that needs more is refused. null: as many as it needs",
    )
    max_documents: int | None = Field(None, ge=1, description="documents used at most; null: all")
    max_tokens: int | None = Field(None, ge=1, description="training tokens used at most; null: all")
    formats: list[Literal["jsonl", "json", "csv", "parquet", "arrow", "text", "warc"]] = Field(
        [], description="read only files of these formats; []: every one that is known"
    )
    max_record_bytes: int | None = Field(None, ge=1, description="in place of reading.max_record_bytes")


class TokenizeConfig(SourcesConfig):
    """`nemotron data tokenize`."""

    run: RunConfig
    sources: list[SourceConfig] = Field(
        [], description="documents, source by source; a plain string is a path and becomes a source"
    )
    phases: list[PhaseConfig] = Field(
        [], description="weights that change while training; []: one phase with the sources' own weights"
    )
    blend: str | None = Field(
        None, description="JSON or YAML file with `sources` and `phases`; they take its place here (see README.md)"
    )
    add_eos: bool = Field(True, description="end every document with the tokenizer's end-of-sequence token")
    add_bos: bool = Field(False, description="begin every document with the beginning-of-sequence token")
    num_shards: int | None = Field(
        None, ge=1, description="files (.bin/.idx) that the training tokens of a source become; null: by shard_bytes"
    )
    shard_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="bytes of input a shard at most, where num_shards is null: the unit of work and resume. "
        "A 32nd of all input, but at least 1 MiB, where that is less, so that workers share a small input",
    )
    train_tokens: int | None = Field(
        None, ge=1, description="tokens that the model is to be trained on; null: as many as the sources hold"
    )
    seq_length: int = Field(8192, ge=1, description="tokens a training sequence, what the loader draws at a time")
    seed: Seed = Field(1234, description="of the split into training, validation and test documents")

    @model_validator(mode="before")
    @classmethod
    def _read_sources(cls, data: Any) -> Any:
        """Put the content of `blend` in its place, and make sources of plain paths."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("blend"), str):
            for key in ("sources", "phases"):
                if data.get(key):
                    raise ValueError(f"blend and {key} are both given; a blend file brings its own {key}")
            data |= read_blend(expanded(data["blend"]))
            data["blend"] = None
        if isinstance(data.get("sources"), list):
            data["sources"] = named(data["sources"], "documents")
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.sources:
            raise ValueError("no source: give sources=[FOLDER, …] or blend=FILE")
        self.check_sources(self.sources)
        self._check_weights()
        self._check_phases([source.name for source in self.sources])
        return self

    def _check_weights(self) -> None:
        trained = [source for source in self.sources if not self.held_out(source)]
        if not trained:
            raise ValueError("every source is held out: none is left to train on")
        for source in self.sources:
            if self.phases and source.weight is not None:
                raise ValueError(f"source {source.name!r} has a weight, and so have the phases; give one of them")
            if source.weight and self.held_out(source):
                raise ValueError(f"source {source.name!r} is held out and has weight {source.weight:g}")
        check_weights(self.sources, [source.name for source in trained if source.weight is None])

    def _check_phases(self, names: list[str]) -> None:
        if self.phases:
            check_phase_ends(self.phases, "phases")
        held_out = {source.name for source in self.sources if self.held_out(source)}
        for phase in self.phases:
            for name, weight in phase.weights.items():
                if name not in names:
                    raise ValueError(f"phase {phase.name!r}: no source named {name!r}{_nearest(name, names)}")
                if weight and name in held_out:
                    raise ValueError(f"phase {phase.name!r}: source {name!r} is held out and has weight {weight:g}")
            if not any(phase.weights.values()):
                raise ValueError(f"phase {phase.name!r}: no weight above 0")
        for name in names if self.phases else ():
            if name not in held_out and not any(name in phase.weights for phase in self.phases):
                raise ValueError(f"source {name!r} has no weight in any phase; 0 leaves it out")

    def max_record_bytes(self, source: SourceConfig) -> int:
        """Bytes of one record of a source at most."""
        return source.max_record_bytes or self.reading.max_record_bytes

    def requested_phases(self) -> list[dict[str, Any]] | None:
        """The phases as `{"name", "until", "weights"}`, however they are given, of the sources that are trained on.

        None: no weights at all, that is, in proportion to the sources' training tokens x repeats.
        """
        weights = {source.name: source.weight for source in self.sources if source.weight is not None}
        phases = [phase.model_dump() for phase in self.phases]
        phases = phases or ([{"name": "all", "until": 1.0, "weights": weights}] if weights else [])
        held_out = {source.name for source in self.sources if self.held_out(source)}
        for phase in phases:
            phase["weights"] = {name: weight for name, weight in phase["weights"].items() if name not in held_out}
        return phases or None


# --- Blend files ------------------------------------------------------------------------------------------------------


def read_blend(path: Path) -> dict[str, Any]:
    """`{"sources": […], "phases": […]}` from a blend file.

    Three shapes are read: a mapping with `sources` and, if wanted, `phases`, as in a config; the shape in which blends
    are published, a list of `{name, path, weight, …}` (or a mapping with that list as `datasets`); and one such list a
    split, `{"train": […], "valid": […], "test": […]}`. Relative paths start at the file's folder.

    ValueError: no such file, another shape, an unknown key (with the nearest), a wrong type; it names file and entry.
    """
    if not path.is_file():
        error = no_such_file(str(path))
        raise ValueError(f"blend: {error.message}" + (f", {error.hint}" if error.hint else ""))
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else read_yaml(text, str(path))[0]
    except (OSError, ValueError) as error:
        raise ValueError(f"blend: cannot read {path}: {error}") from None
    if isinstance(content, list):
        content = {"datasets": content}
    if not isinstance(content, dict):
        raise ValueError(f"blend: {path} is neither a mapping nor a list")
    shapes = {"sources": ("sources", "phases"), "datasets": ("datasets",), "train": ("train", "valid", "test")}
    shape = next((name for name in shapes if name in content), None)
    if shape is None:
        raise ValueError(f"blend: {path} has none of the keys {', '.join(shapes)}")
    _check_keys(content, shapes[shape], f"blend: {path}")
    if shape == "sources":
        sources = [_check_source(entry, path, index) for index, entry in enumerate(_list(content, "sources", path))]
        return {"sources": sources, "phases": content.get("phases") or []}
    sources = []
    for key in shapes[shape]:
        for index, entry in enumerate(_list(content, key, path)):
            sources.append(_check_source(_of_published(entry, key, path, index), path, index))
    return {"sources": sources, "phases": []}


_PUBLISHED_KEYS = ("name", "path", "weight", "subset", "split", "text_field", "repeats", "max_documents", "max_tokens")


def _of_published(entry: Any, split: str, path: Path, index: int) -> dict[str, Any]:
    """A source from one entry of a published blend. The sources of a split other than train are held out."""
    at = f"blend: {path}: {split}[{index}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{at} is not a mapping")
    _check_keys(entry, _PUBLISHED_KEYS, at)
    location = entry.get("path")
    if not isinstance(location, str):
        raise ValueError(f"{at}: `path` must be a string")
    if location.startswith("hf://"):
        location += f":{entry['subset']}" if entry.get("subset") else ""
        location += f"/{entry['split']}" if entry.get("split") else ""
    elif key := next((key for key in ("subset", "split") if entry.get(key)), None):
        raise ValueError(f"{at}: `{key}` is for hf:// paths, not for {location}")
    source: dict[str, Any] = {"paths": [location]}
    source |= {key: entry[key] for key in ("name", "weight", "repeats", "max_documents", "max_tokens") if key in entry}
    if entry.get("text_field"):
        source["columns"] = {"text": entry["text_field"]}
    if split in ("valid", "test"):
        source.pop("weight", None)  # its tokens are not drawn for training
        name = source.get("name", name_of([location], "documents"))
        source |= {"name": f"{name}-{split}"} if isinstance(name, str) else {}
        source |= {"valid_fraction": float(split == "valid"), "test_fraction": float(split == "test")}
    elif split == "train":
        source |= {"valid_fraction": 0.0, "test_fraction": 0.0}  # the other lists are held out
    return source


def _check_source(entry: Any, path: Path, index: int) -> dict[str, Any]:
    """An entry as a validated source's values. ValueError that names the file, because no config line does."""
    at = f"blend: {path}: source {index}"
    values = {"paths": [entry]} if isinstance(entry, str) else entry
    if not isinstance(values, dict):
        raise ValueError(f"{at} is neither a path nor a mapping")
    _check_keys(values, SourceConfig.model_fields, at, SourceConfig.other_names)
    values = dict(values)
    if isinstance(values.get("paths"), list):
        values["paths"] = [_beside(path, location) for location in values["paths"]]
    name = values.get("name", name_of(values.get("paths"), "documents"))  # where it has none, `named` gives one
    try:
        source = SourceConfig.model_validate_json(json.dumps({"name": name, **values}), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        reason = str(fault["msg"]).removeprefix("Value error, ")
        raise ValueError(f"{at} ({name}): {key}{': ' if key else ''}{reason}") from None
    return source.model_dump(exclude_none=True, exclude={"name"} - values.keys())


def _beside(path: Path, location: Any) -> Any:
    """A relative location of a blend file, from the file's folder."""
    if not isinstance(location, str) or "://" in location:
        return location
    return str(path.absolute().parent / expanded(location))


def _list(content: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"blend: {path}: {key} must be a list")
    return value


def _check_keys(
    mapping: Mapping[str, Any], known: Iterable[str], at: str, other_names: Mapping[str, str] | None = None
) -> None:
    known = list(known)
    for key in mapping:
        if key not in known:
            called = (other_names or {}).get(key)
            meant = f"; here it is called {called}" if called else _nearest(key, known)
            raise ValueError(f"{at}: unknown key {key!r}{meant}")


def _nearest(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence about a misspelt word: the nearest choice, else all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, 1)
    return f", did you mean {near[0]!r}?" if near else f"; there is {', '.join(choices)}"
