"""Every knob of `pack.py`. Imports only the standard library and pydantic, so that it loads anywhere.

A config is checked without a look at the network: local files have to exist, what stands behind a URL is found out when
the run begins.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, 1)
    raise ValueError(
        f"no such file or folder: {location}" + (f", did you mean {path.parent / near[0]}?" if near else "")
    )


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
    raise ValueError(f"no such folder or file: {tokenizer}")


def state_of(locations: Iterable[str]) -> str:
    """16 hex digits over names, sizes and times of change of the local files behind `locations`; empty without any.

    Changed files make another run, although the config reads the same. Files in a published artifact do not count: its
    digest is in the run's identity already.
    """
    state = hashlib.sha256()
    seen: set[str] = set()
    for location in locations:
        if _TO_COME not in location and "://" not in location:
            path = Path(location).expanduser()
            names = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207
            seen.update(file for name in names for file in _files_below(Path(name).absolute()))
    for name in sorted(seen):
        try:
            status = os.stat(name)  # noqa: PTH116
        except OSError:  # a link that leads nowhere, say: listing leaves it out, too, or says what is wrong
            continue
        state.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16] if seen else ""


def _files_below(path: Path) -> Iterator[str]:
    if any((folder / "artifact.json").is_file() for folder in (path, *path.parents)):
        return
    if path.is_file():
        yield str(path)
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith("."))  # noqa: PTH118  many


Location = Annotated[str, AfterValidator(_check_location)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class RunConfig(Group):
    """Names of what is read and written."""

    script: Literal["pack.py"] = Field("pack.py", description="the script that this config is for")
    config: str = Field("", description="name of this config; filled in")
    tokenizer: str | None = Field(None, description="artifact with a tokenizer, for ${art:tokenizer,tokenizer_path}")
    output: str = Field(description="artifact written: the packed conversations")


class SourceConfig(Group):
    """A source of conversations. A location alone may stand for it."""

    # What a source of `nemotron nano3 data prep` calls it.
    other_names: ClassVar[dict[str, str]] = {
        "path": "locations",
        "paths": "locations",
        "messages_field": "columns: {messages: …}",
        "max_examples": "max_conversations",
    }

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120, description="in the tables of what was kept"
    )
    locations: list[Location] = Field(
        min_length=1,
        description="JSONL, Parquet or Arrow: files, folders, globs, hf://ORG/DATASET[:CONFIG][/SPLIT][@REVISION], "
        "s3://, gs://, https://",
    )
    columns: dict[str, str] = Field(
        {}, description="wanted field -> the column or dotted key that holds it: {messages: conversation}"
    )
    used_in: list[str] = Field([], description="keep records whose used_in names one of these; []: all")
    weight: float | None = Field(None, ge=0, description="share of the training tokens, beside the others' weights")
    repeats: float | None = Field(
        None,
        gt=0,
        description="epochs of it: at most, where there are weights; null: one, or as many as num_tokens needs",
    )
    max_conversations: int | None = Field(None, ge=1, description="read at most; null: all")
    low_effort: bool = Field(
        False, description="its answers are those to a user who asks for little reasoning (super3)"
    )
    valid_fraction: Fraction | None = Field(None, description="in place of splits.valid")
    test_fraction: Fraction | None = Field(None, description="in place of splits.test")
    on_error: Literal["stop", "skip"] | None = Field(None, description="in place of reading.on_error")
    state: str = Field("", description="digest over the local files' sizes and times of change, filled in")

    @model_validator(mode="after")
    def _note_state(self) -> Self:
        fields = ("messages", "tools", "used_in")
        for name in self.columns:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1)
                meant = f", did you mean `{near[0]}`?" if near else f"; there is {', '.join(fields)}"
                raise ValueError(f"columns: unknown field `{name}`{meant}")
        self.state = state_of(self.locations)
        return self


class ExampleConfig(Group):
    """Conversations made up by `example.py`: two or three turns, reasoning, a tool or none."""

    num_conversations: int = Field(0, ge=0, description="how many, at scale full; 0: none")
    seed: int = Field(7, ge=0, description="of what they are about")


class ReasoningConfig(Group):
    """Reasoning control: which conversations lose their reasoning, by hash."""

    off_share: Fraction = Field(0.0, description="share of conversations whose reasoning is stripped")
    truncated_share: Fraction = Field(0.0, description="share whose reasoning is cut at a random word")

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.off_share + self.truncated_share > 1:
            raise ValueError(f"off_share {self.off_share} + truncated_share {self.truncated_share} exceed 1")
        return self


class SplitsConfig(Group):
    """Shares of the conversations that are held out, by hash."""

    valid: float = Field(0.01, ge=0, lt=1, description="looked at while training")
    test: float = Field(0.0, ge=0, lt=1, description="looked at at the end")


class PackingConfig(Group):
    """Sequences into rows of one length."""

    seq_length: int = Field(4096, ge=16, description="tokens a row at most")
    too_long: Literal["drop", "cut"] = Field("drop", description="what is done to a longer sequence; both are counted")
    algorithm: Literal[
        "best_fit",
        "best_fit_decreasing",
        "first_fit_decreasing",
        "first_fit_shuffle",
        "modified_first_fit_decreasing",
    ] = Field("best_fit_decreasing", description="which row a sequence goes to: nemotron.data_prep.chat.bin_packing")
    file_tokens: int = Field(16 * 2**20, ge=1, description="tokens a Parquet file, about: a task's work")


class ReadingConfig(Group):
    """What is done about records that cannot be read or trained on; a source may say otherwise for itself."""

    on_error: Literal["stop", "skip"] = Field("stop", description="stop, or leave the record out and count it")
    max_record_bytes: int = Field(
        32 * 2**20, ge=1, description="bytes of one record; a longer one is an error like any other"
    )
    max_skipped: Fraction = Field(
        0.5,
        description="share of a source's records that `skip` may leave out; above it the run ends and nothing is "
        "published. Sources of fewer than 10 records: only if none of them is left",
    )


class PackConfig(Group):
    """`nemotron data pack`."""

    run: RunConfig
    scale: Literal["tiny", "small", "medium", "full"] = Field(
        "full", description="share of the made-up conversations to use"
    )
    seed: int = Field(1234, ge=0, description="of packing order, held-out splits and reasoning control")
    tokenizer: Annotated[str, AfterValidator(_check_tokenizer)] = Field(
        description="folder with tokenizer.json, that file, or hf://ORG/MODEL[@REVISION]"
    )
    tokenizer_state: str = Field("", description="digest over the local tokenizer's size and time of change, filled in")
    chat_template: Literal["nano2", "nano3", "super3"] = Field("nano3", description="how messages become text")
    sources: list[SourceConfig] = Field(
        [], description="conversations, source by source; a plain string is a location and becomes a source"
    )
    example: ExampleConfig = Field(default_factory=ExampleConfig)
    num_tokens: int | None = Field(
        None, ge=1, description="training tokens, with weights; null: the most that repeats allow"
    )
    splits: SplitsConfig = Field(default_factory=SplitsConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    reading: ReadingConfig = Field(default_factory=ReadingConfig)
    shard_bytes: int = Field(32 * 2**20, ge=1, description="bytes of input a task, where a file can be cut")

    @model_validator(mode="before")
    @classmethod
    def _name_sources(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("sources"), list):
            data = {**data, "sources": _named(data["sources"])}
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [source.name for source in self.sources] + ["example"] * bool(self.example.num_conversations)
        if not names:
            raise ValueError("no conversations: give sources=[FOLDER, …]")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"sources: two of the name {twice[0]!r}")
        weighed = [source for source in self.sources if source.weight is not None]
        missing = [source.name for source in self.sources if source.weight is None]
        if weighed and (missing or self.example.num_conversations):
            lacking = ", ".join(repr(name) for name in missing[:3]) or "the example"
            raise ValueError(f"no weight for {lacking}, while others have one; 0 leaves a source out")
        if weighed and not any(source.weight for source in weighed):
            raise ValueError("the weights of all sources are 0")
        if self.num_tokens is not None and not weighed:
            raise ValueError("num_tokens goes with weights; without them every source is used `repeats` times")
        for source in self.sources:
            if source.low_effort and self.chat_template != "super3":
                raise ValueError(f"source {source.name!r}: low_effort is for chat_template super3")
            held_out = self.valid_fraction(source) + self.test_fraction(source)
            if held_out > 1:
                raise ValueError(f"source {source.name!r}: {held_out:g} held out are more than all of it")
        self.tokenizer_state = state_of([self.tokenizer])
        return self

    def valid_fraction(self, source: SourceConfig) -> float:
        """Share of a source's conversations for validation."""
        return self.splits.valid if source.valid_fraction is None else source.valid_fraction

    def test_fraction(self, source: SourceConfig) -> float:
        """Share of a source's conversations for test."""
        common = min(self.splits.test, 1 - self.valid_fraction(source))
        return common if source.test_fraction is None else source.test_fraction


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
    plain = [part for part in location.partition("@")[0].split("/") if part and not glob.has_magic(part)]
    name = re.sub(r"(\.(jsonl|json|parquet|arrow|gz|zst|zstd))+$", "", plain[-1]) if plain else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:120] or "conversations"
