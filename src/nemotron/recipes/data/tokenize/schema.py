"""Every knob of `tokenize_documents.py`. Imports only the standard library and pydantic, so that it loads anywhere.

A config is checked without a look at the network: local files have to exist, what stands behind a URL is found out when
the run begins.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

SCHEMES = ("hf://", "s3://", "gs://", "https://", "http://")
_TO_COME = "(resolved at start)>"  # how a dry run spells a value of an artifact that is not made yet
_HUB_NAME = re.compile(r"hf://(?:datasets/|models/)?[\w.-]+/[\w.-]+(?:[:/@].*)?")


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _check_location(location: str) -> str:
    """A location that can be read, as far as that is known without a network. ValueError with the nearest one."""
    if _TO_COME in location:
        return location
    scheme, separator, _ = location.partition("://")
    if separator:
        if f"{scheme}://" not in SCHEMES:
            near = difflib.get_close_matches(f"{scheme}://", SCHEMES, 1)
            known = f"did you mean {near[0]}?" if near else f"known: {', '.join(SCHEMES)}, a path"
            raise ValueError(f"unknown kind of location {scheme}://; {known}")
        if scheme == "hf" and not _HUB_NAME.fullmatch(location):
            raise ValueError("write hf://ORGANISATION/DATASET, then :CONFIG, /SPLIT and @REVISION where wanted")
        return location
    path = Path(location).expanduser()
    if path.exists():
        return location
    if glob.has_magic(location):
        if next(glob.iglob(str(path), recursive=True), None) is None:  # noqa: PTH207  takes absolute patterns too
            raise ValueError(f"no file matches {location}")
        return location
    raise ValueError(f"no such file or folder: {location}{_nearest_path(path)}")


def _nearest_path(path: Path) -> str:
    """The end of a sentence that names the sibling which `path` may have meant; empty where there is none."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, 1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def _check_tokenizer(tokenizer: str) -> str:
    if _TO_COME in tokenizer or _HUB_NAME.fullmatch(tokenizer):
        return tokenizer
    path = Path(tokenizer).expanduser()
    if (path / "tokenizer.json").is_file() or (path.is_file() and path.suffix == ".json"):
        return tokenizer
    if path.is_dir():
        raise ValueError(f"{tokenizer}: no tokenizer.json in it")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", tokenizer):
        raise ValueError(f"no such folder; for a model of the Hugging Face Hub write hf://{tokenizer}")
    raise ValueError(f"no such folder or file{_nearest_path(path)}")


def state_of(locations: Iterable[str]) -> str:
    """16 hex digits over names, sizes and times of change of the local files behind `locations`; empty without any.

    Changed files make another run, although the config reads the same. A published artifact does not change, and its
    digest is in the run's identity already: files in one do not count.
    """
    state = hashlib.sha256()
    seen: set[str] = set()
    for location in locations:
        if _TO_COME not in location and "://" not in location:
            path = Path(location).expanduser()
            names = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207
            seen.update(file for name in names for file in _files_below(Path(name)))
    for name in sorted(seen):
        try:
            status = os.stat(name)  # noqa: PTH116
        except OSError:  # a link that leads nowhere, say: listing leaves it out, too, or says what is wrong
            continue
        state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16] if seen else ""


def _files_below(path: Path) -> Iterator[str]:
    """`path`, or the files of the folder that it is, as absolute names; hidden ones and those of artifacts left out."""
    path = path.absolute()
    if any((folder / "artifact.json").is_file() for folder in (path, *path.parents)):
        return
    if path.is_file():
        yield str(path)
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))  # noqa: PTH118  many


Location = Annotated[str, AfterValidator(_check_location)]


class RunConfig(Group):
    """Names of what is read and written."""

    # Not tokenize.py: a script's folder comes first on the path, and half of the standard library imports `tokenize`.
    script: Literal["tokenize_documents.py"] = Field(
        "tokenize_documents.py", description="the script that this config is for"
    )
    config: str = Field("", description="name of this config; filled in")
    data: str | None = Field(None, description="artifact with documents, for ${art:data,train_path} in a location")
    tokenizer: str | None = Field(None, description="artifact with a tokenizer, for ${art:tokenizer,tokenizer_path}")
    output: str = Field(description="artifact written: the token streams and their blend")


class SourceConfig(Group):
    """A source: documents that get a weight together. A location alone may stand for it."""

    # What a source of `nemotron nano3 data prep` and an entry of a published blend call it.
    other_names: ClassVar[dict[str, str]] = {
        "path": "locations",
        "paths": "locations",
        "text_field": "columns: {text: …}",
        "max_examples": "max_documents",
    }

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120, description="in the blend and of its files"
    )
    locations: list[Location] = Field(
        min_length=1,
        description="files, folders, globs, hf://ORG/DATASET[:CONFIG][/SPLIT][@REVISION], s3://, gs://, https://",
    )
    weight: float | None = Field(
        None, ge=0, description="share of the tokens drawn, beside the weights of the others; 0 leaves it out"
    )
    repeats: float | None = Field(
        None, gt=0, description="epochs of it at most; a blend that needs more is refused. null: as many as it needs"
    )
    max_documents: int | None = Field(None, ge=1, description="documents used at most; null: all")
    max_tokens: int | None = Field(None, ge=1, description="training tokens used at most; null: all")
    columns: dict[str, str] = Field(
        {"text": "text"}, description="wanted field -> the column or dotted key that holds it: {text: data.body}"
    )
    formats: list[Literal["jsonl", "parquet", "arrow", "text", "warc"]] = Field(
        [], description="read only files of these formats; []: every one that is known"
    )
    on_error: Literal["stop", "skip"] | None = Field(None, description="in place of reading.on_error")
    max_record_bytes: int | None = Field(None, ge=1, description="in place of reading.max_record_bytes")
    valid_fraction: float | None = Field(
        None, ge=0, le=1, description="in place of splits.valid; 1: all of it is held out"
    )
    test_fraction: float | None = Field(None, ge=0, le=1, description="in place of splits.test")
    state: str = Field("", description="digest over the local files' sizes and times of change, filled in")

    @model_validator(mode="after")
    def _note_state(self) -> Self:
        if "text" not in self.columns:
            raise ValueError(f"columns: names no `text`, only {', '.join(self.columns) or 'nothing'}")
        self.state = state_of(self.locations)
        return self


class ReadingConfig(Group):
    """What is done about records that cannot be read; a source may say otherwise for itself."""

    on_error: Literal["stop", "skip"] = Field("stop", description="stop, or leave the record out and count it")
    max_record_bytes: int = Field(
        32 * 2**20, ge=1, description="bytes of one record; a longer one is an error like any other"
    )
    max_skipped: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a source's records that `skip` may leave out; above it the run ends and nothing is "
        "published. Sources of fewer than 10 records: only if none of them is left",
    )


class SplitsConfig(Group):
    """Shares of the documents that are held out, by a hash of the text: equal texts are on one side."""

    valid: float = Field(0.01, ge=0, lt=1, description="looked at while training")
    test: float = Field(0.0, ge=0, lt=1, description="looked at at the end")


class PhaseConfig(Group):
    """One phase of the blend."""

    name: str = Field(description="for people")
    until: float = Field(gt=0, le=1, description="share of all training tokens at which the phase ends")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        description="source -> weight; weights of a phase are normalised to sum 1"
    )


class TokenizeConfig(Group):
    """`nemotron data tokenize`."""

    run: RunConfig
    sources: list[SourceConfig] = Field(
        [], description="documents, source by source; a plain string is a location and becomes a source"
    )
    phases: list[PhaseConfig] = Field(
        [], description="weights that change while training; []: one phase with the sources' own weights"
    )
    blend: str | None = Field(
        None, description="JSON or YAML file with `sources` and `phases`; they take its place here (see README.md)"
    )
    tokenizer: Annotated[str, AfterValidator(_check_tokenizer)] = Field(
        description="folder with tokenizer.json, that file, or hf://ORG/MODEL[@REVISION]"
    )
    tokenizer_state: str = Field("", description="digest over the local tokenizer's size and time of change, filled in")
    add_eos: bool = Field(True, description="end every document with the tokenizer's end-of-sequence token")
    add_bos: bool = Field(False, description="begin every document with the beginning-of-sequence token")
    splits: SplitsConfig = Field(default_factory=SplitsConfig)
    reading: ReadingConfig = Field(default_factory=ReadingConfig)
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
    seed: int = Field(1234, ge=0, description="of the split into training, validation and test documents")

    @model_validator(mode="before")
    @classmethod
    def _read_sources(cls, data: Any) -> Any:
        """Put the content of `blend` in its place, and make sources of plain locations."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("blend"), str):
            for key in ("sources", "phases"):
                if data.get(key):
                    raise ValueError(f"blend and {key} are both given; a blend file brings its own {key}")
            data |= read_blend(Path(data["blend"]).expanduser())
            data["blend"] = None
        if isinstance(data.get("sources"), list):
            data["sources"] = _named(data["sources"])
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("no source: give sources=[FOLDER, …] or blend=FILE")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources: two of the name {twice[0]!r}")
        for source in self.sources:
            if self.valid_fraction(source) + self.test_fraction(source) > 1:
                raise ValueError(
                    f"source {source.name!r}: {self.valid_fraction(source):g} for validation and "
                    f"{self.test_fraction(source):g} for test are more than all of it"
                )
        self._check_weights()
        self._check_phases(names)
        self.tokenizer_state = state_of([self.tokenizer])
        return self

    def _check_weights(self) -> None:
        weighed = [source for source in self.sources if source.weight is not None]
        if self.phases and weighed:
            raise ValueError(f"source {weighed[0].name!r} has a weight, and so have the phases; give one of them")
        trained = [source for source in self.sources if not self.held_out(source)]
        if not trained:
            raise ValueError("every source is held out: none is left to train on")
        for source in weighed:
            if source.weight and self.held_out(source):
                raise ValueError(f"source {source.name!r} is held out and has weight {source.weight:g}")
        missing = [source.name for source in trained if source.weight is None]
        if weighed and missing:
            some = ", ".join(repr(name) for name in missing[:3])
            raise ValueError(f"no weight for {some}, while others have one; 0 leaves a source out")
        if weighed and not any(source.weight for source in weighed):
            raise ValueError("the weights of all sources are 0")

    def _check_phases(self, names: list[str]) -> None:
        ends = [phase.until for phase in self.phases]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1.0):
            raise ValueError(f"phases: `until` must rise from phase to phase and end at 1.0, not {ends}")
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

    def valid_fraction(self, source: SourceConfig) -> float:
        """Share of a source's documents for validation."""
        return self.splits.valid if source.valid_fraction is None else source.valid_fraction

    def test_fraction(self, source: SourceConfig) -> float:
        """Share of a source's documents for test."""
        # What is held out for validation altogether leaves nothing for the common share.
        common = min(self.splits.test, 1 - self.valid_fraction(source))
        return common if source.test_fraction is None else source.test_fraction

    def held_out(self, source: SourceConfig) -> bool:
        """Whether no document of a source is for training."""
        return self.valid_fraction(source) + self.test_fraction(source) >= 1

    def on_error(self, source: SourceConfig) -> Literal["stop", "skip"]:
        """What to do about a record of a source that cannot be read."""
        return source.on_error or self.reading.on_error

    def max_record_bytes(self, source: SourceConfig) -> int:
        """Bytes of one record of a source at most."""
        return source.max_record_bytes or self.reading.max_record_bytes

    def requested_phases(self) -> list[dict[str, Any]] | None:
        """The phases as `{"name", "until", "weights"}`, whichever way they are given.

        None: no weights at all, that is, in proportion to the sources' training tokens x repeats.
        """
        if self.phases:
            return [phase.model_dump() for phase in self.phases]
        weights = {source.name: source.weight for source in self.sources if source.weight is not None}
        return [{"name": "all", "until": 1.0, "weights": weights}] if weights else None


# --- Blend files and sources without a name ---------------------------------------------------------------------------


def read_blend(path: Path) -> dict[str, Any]:
    """`{"sources": […], "phases": […]}` from a blend file.

    Three shapes are read: a mapping with `sources` and, if wanted, `phases`, as in a config; the shape in which blends
    are published, a list of `{name, path, weight, …}` (or a mapping with that list as `datasets`); and one such list a
    split, `{"train": […], "valid": […], "test": […]}`. Relative paths start at the file's folder.

    ValueError: no such file, another shape, an unknown key (with the nearest), a wrong type; it names file and entry.
    """
    if not path.is_file():
        raise ValueError(f"blend: no such file: {path}{_nearest_path(path)}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
        else:
            # By name: the dialect of the configs, whose reader is there wherever a config is checked.
            content = importlib.import_module("nemo_runspec.config.yaml_text").read_yaml(text, str(path))[0]
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
    elif entry.get("subset"):
        raise ValueError(f"{at}: `subset` is for hf:// paths, not for {location}")
    source: dict[str, Any] = {"locations": [location]}
    source |= {key: entry[key] for key in ("name", "weight", "repeats", "max_documents", "max_tokens") if key in entry}
    if entry.get("text_field"):
        source["columns"] = {"text": entry["text_field"]}
    if split in ("valid", "test"):
        source.pop("weight", None)  # its tokens are not drawn for training
        name = source.get("name")
        source |= {"name": f"{name}-{split}"} if isinstance(name, str) else {}
        source |= {"valid_fraction": float(split == "valid"), "test_fraction": float(split == "test")}
    elif split == "train":
        source |= {"valid_fraction": 0.0, "test_fraction": 0.0}  # the other lists are held out
    return source


def _check_source(entry: Any, path: Path, index: int) -> dict[str, Any]:
    """An entry as a validated source's values. ValueError that names the file, because no config line does."""
    at = f"blend: {path}: source {index}"
    given = {"locations": [entry]} if isinstance(entry, str) else entry
    if not isinstance(given, dict):
        raise ValueError(f"{at} is neither a location nor a mapping")
    _check_keys(given, SourceConfig.model_fields, at, SourceConfig.other_names)
    given = dict(given)
    if isinstance(given.get("locations"), list):
        given["locations"] = [_beside(path, location) for location in given["locations"]]
    given.setdefault("name", _name_of(given))
    try:
        source = SourceConfig.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        said = str(fault["msg"]).removeprefix("Value error, ")
        raise ValueError(f"{at} ({given['name']}): {key}{': ' if key else ''}{said}") from None
    return {key: value for key, value in source.model_dump().items() if value is not None}


def _beside(path: Path, location: Any) -> Any:
    """A relative location of a blend file, from the file's folder."""
    if not isinstance(location, str) or "://" in location:
        return location
    return str(path.absolute().parent / Path(location).expanduser())


def _list(content: Mapping[str, Any], key: str, path: Path) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"blend: {path}: {key} must be a list")
    return value


def _check_keys(
    given: Mapping[str, Any], known: Iterable[str], at: str, other_names: Mapping[str, str] | None = None
) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            called = (other_names or {}).get(key)
            meant = f"; here it is called {called}" if called else _nearest(key, known)
            raise ValueError(f"{at}: unknown key {key!r}{meant}")


def _nearest(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence about a misspelt word: the nearest choice, else all of them."""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, 1)
    return f", did you mean {near[0]!r}?" if near else f"; there is {', '.join(choices)}"


def _named(sources: list[Any]) -> list[Any]:
    """Sources as mappings: a string is a location. Those without a name get one, each another."""
    given = [{"locations": [source]} if isinstance(source, str) else source for source in sources]
    taken = {source["name"] for source in given if isinstance(source, dict) and isinstance(source.get("name"), str)}
    named: list[Any] = []
    for source in given:
        if isinstance(source, dict) and "name" not in source:
            base = name = _name_of(source)
            count = 1
            while name in taken:
                count += 1
                name = f"{base}-{count}"
            taken.add(name)
            source = {"name": name, **source}
        named.append(source)
    return named


def _name_of(source: Mapping[str, Any]) -> str:
    """A name from the first location: the file's or folder's, or what a URL ends in."""
    locations = source.get("locations")
    location = locations[0] if isinstance(locations, list) and locations and isinstance(locations[0], str) else ""
    scheme, _, rest = location.rpartition("://")
    if scheme == "hf":
        name = rest.partition("@")[0].removeprefix("datasets/").partition("/")[2].replace(":", "-").replace("/", "-")
    elif _TO_COME in location:
        name = "documents"
    else:
        whole = rest if scheme else str(Path(location).expanduser().absolute())
        plain = [part for part in whole.split("/") if part and not glob.has_magic(part)]  # of a glob, its folder
        name = re.sub(r"(\.(jsonl|parquet|arrow|txt|md|warc|wet|json|gz|zst|zstd))+$", "", plain[-1]) if plain else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:120] or "documents"
