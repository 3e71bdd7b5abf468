"""Where text comes from: the user's files, addresses and the environments' generators, and what is held out of it.

No network is asked here. An address only has to look like one; local files are looked for after validation
(nemo_runspec.config.validate).
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from nemo_runspec.config.inputs import FieldOfArtifact
from nemo_runspec.errors import nearest
from nemo_runspec.secrets import has_login
from nemo_runspec.user_files import TO_COME, UserFiles, expanded, is_elsewhere
from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES, DifficultyConfig, Family
from nemotron.kit.schemas.group import Group, RunConfig, Scale, Seed

SCHEMES = ("hf://", "s3://", "gs://", "https://", "http://")
_HUB_NAME = re.compile(r"hf://(?:datasets/|models/)?[\w.-]+/[\w.-]+(?:[:/@].*)?")
_SUFFIXES = r"(\.(jsonl|parquet|arrow|txt|md|warc|wet|json|csv|tsv|gz|zst|zstd))+$"


def _check_address(location: str) -> str:
    """An address that can be read, as far as that is known without a network; a path as it is."""
    if TO_COME in location or not is_elsewhere(location):
        return location
    scheme = location.partition("://")[0]
    if f"{scheme}://" not in SCHEMES:
        near = difflib.get_close_matches(f"{scheme}://", SCHEMES, 1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(SCHEMES)}, a path"
        raise ValueError(f"unknown kind of location {scheme}://; {known}")
    if scheme == "hf" and not _HUB_NAME.fullmatch(location):
        raise ValueError("write hf://ORGANISATION/DATASET, then :CONFIG, /SPLIT and @REVISION where wanted")
    if scheme != "hf" and has_login(location):
        raise ValueError("no user or password in an address: it is kept in records; give them in the environment")
    return location


def _check_tokenizer(tokenizer: str) -> str:
    """A folder with tokenizer.json, that file, or an address on the Hugging Face Hub."""
    if is_elsewhere(tokenizer) and not (TO_COME in tokenizer or _HUB_NAME.fullmatch(tokenizer)):
        raise ValueError("a tokenizer is a folder with tokenizer.json, that file, or hf://ORG/MODEL[@REVISION]")
    return tokenizer


def _not_a_tokenizer(path: Path) -> str | None:
    """What is wrong with the path of a tokenizer."""
    if path.is_dir():
        return None if (path / "tokenizer.json").is_file() else f"{path}: no tokenizer.json in it"
    return None if path.suffix == ".json" else f"{path}: neither a folder nor a .json file"


def _perhaps_meant(tokenizer: str) -> str | None:
    """Advice about a path that does not exist, where it looks like the name of a model."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", tokenizer):
        return f"for a model of the Hugging Face Hub write hf://{tokenizer}"
    is_name = re.fullmatch(r"[\w.-]+", tokenizer)
    return "nor is there an artifact of that name: nemotron artifacts list shows them" if is_name else None


Location: TypeAlias = Annotated[str, AfterValidator(_check_address), UserFiles()]
TokenizerLocation: TypeAlias = Annotated[
    str,
    AfterValidator(_check_tokenizer),
    UserFiles(hint=_perhaps_meant, check=_not_a_tokenizer),
    FieldOfArtifact("tokenizer_path"),
    Field(description="an artifact, a folder with tokenizer.json, that file, or hf://ORG/MODEL[@REVISION]"),
]
OnError: TypeAlias = Literal["stop", "skip"]
ScaleAll: TypeAlias = Annotated[
    Scale | None,
    Field(description="share of every source that is taken, your own included, in place of `scale`; --scale sets it"),
]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class DataRunConfig(RunConfig):
    """A run that prepares data."""

    output: str = Field(description="artifact written")


class StepRunConfig(DataRunConfig):
    """A step of data curation: documents in, documents out."""

    data: str = Field(description="artifact read: documents")


class PrepRunConfig(DataRunConfig):
    """A run that prepares the data of a stage."""

    data: str | None = Field(None, description="artifact with data of your own, for ${art:data,path} in sources")


class DataPrepConfig(Group):
    """What every data preparation of a recipe has."""

    run: PrepRunConfig
    scale: Scale = Field("full", description="share of the generated counts to use")
    scale_all: ScaleAll = None
    seed: Seed = Field(1234, description="of every random choice")


# --- The user's files -------------------------------------------------------------------------------------------------


class UserSource(Group):
    """Files of the user's, and which of their fields hold what is wanted: the same keys in every data preparation."""

    fields: ClassVar[tuple[str, ...]] = ()
    """What `columns` may give a name for."""
    other_names: ClassVar[dict[str, str]] = {
        "path": "paths",
        "files": "paths",
        "location": "paths",
        "locations": "paths",
        "data_files": "paths",
    }

    name: str = Field(description="in tables and file names")
    paths: list[Location] = Field(
        min_length=1,
        description="files, folders, globs, hf://ORG/DATASET[:CONFIG][/SPLIT][@REVISION], s3://, gs://, https://",
    )
    columns: dict[str, str] = Field(
        {}, description="wanted field -> the column or dotted key that holds it: {text: data.body}"
    )

    @model_validator(mode="after")
    def _columns_are_known(self) -> Self:
        for name, column in self.columns.items():
            if name in self.fields:
                continue
            near = nearest(name, self.fields)
            if column in self.fields and near in (None, column):
                meant = f"; the wanted field comes first: {{{column}: {name}}}"
            else:
                meant = f", did you mean `{near}`?" if near else f"; there is {', '.join(self.fields)}"
            raise ValueError(f"columns: unknown field `{name}`{meant}")
        return self


# --- Generated tasks --------------------------------------------------------------------------------------------------


class TasksConfig(Group):
    """Tasks from the environments' generators."""

    families: list[Family] = Field(list(DEFAULT_FAMILIES), description="which; [] for none")
    num_tasks: int = Field(ge=1, description="training tasks of each family at scale full")
    num_valid_tasks: int = Field(ge=1, description="validation tasks of each family at scale full")
    seed: Seed = Field(description="of the generators; the split goes by the task, not by this")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )


# --- Sources of a recipe's data preparation ---------------------------------------------------------------------------


class OwnSourceConfig(UserSource):
    """A source of the user's own data. A path alone may stand for it."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="its name in the table of what was kept")
    on_error: OnError = Field(
        "stop", description="at a record or file that cannot be read: stop and name it, or skip and count it"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """A path alone is a source named after its file or folder. ValueError: no name can be made of it."""
        if isinstance(value, str):
            name = re.sub(r"[^a-z0-9]+", "_", Path(value.rstrip("/")).name.split(".")[0].lower()).strip("_")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"no name can be made of {value!r}: write {{name: mine, paths: [{value}]}}")
            return {"name": name, "paths": [value]}
        return value


def check_names(names: Iterable[str]) -> None:
    """Refuse two sources of one name."""
    names = list(names)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"sources: two of the name {twice!r}; a source of yours gets another by {{name: my_{twice}, paths: […]}}"
        )


# --- Sources of `nemotron data` ---------------------------------------------------------------------------------------


class SourceConfig(UserSource):
    """A source: records that get a weight together. A path alone may stand for it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=120, description="in tables and file names")
    weight: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="share of the tokens drawn, beside the weights of the others; 0: it is not trained on",
    )
    repeats: float | None = Field(None, gt=0, allow_inf_nan=False, description="epochs of it")
    on_error: OnError | None = Field(None, description="in place of reading.on_error")
    valid_fraction: Fraction | None = Field(None, description="in place of splits.valid; 1: all of it is held out")
    test_fraction: Fraction | None = Field(None, description="in place of splits.test")


class ReadingConfig(Group):
    """What is done about records that cannot be used; a source may say otherwise for itself."""

    on_error: OnError = Field("stop", description="stop, or leave the record out and count it")
    max_record_bytes: int = Field(
        32 * 2**20, ge=1, description="bytes of one record; a longer one is an error like any other"
    )
    max_skipped: Fraction = Field(
        0.5,
        description="share of a source's records that `skip` may leave out, and of its bytes, which behind the damage "
        "of a file are not read; above it the run ends and nothing is published. Sources of fewer than 10 records: "
        "only if none of them is left",
    )


class SplitsConfig(Group):
    """Shares of the records that are held out, by a hash of the text or, of a conversation, of its beginning up to the
    user's first message: equal texts and all answers to a message are on one side, of sources with the same shares."""

    valid: float = Field(0.01, ge=0, lt=1, description="looked at while training")
    test: float = Field(0.0, ge=0, lt=1, description="looked at at the end")


class PhaseConfig(Group):
    """One phase of the blend."""

    name: str = Field(description="for people")
    until: float = Field(gt=0, le=1, description="share of all training tokens at which the phase ends")
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        description="source -> weight; weights of a phase are normalised to sum 1"
    )


class SourcesRunConfig(DataRunConfig):
    """Names of what is read and written."""

    tokenizer: str | None = Field(None, description="artifact with a tokenizer, which tokenizer=NAME sets")


class SourcesConfig(Group):
    """What `nemotron data` makes of sources: their splits, and what is done about bad records."""

    run: SourcesRunConfig
    scale_all: ScaleAll = None
    tokenizer: TokenizerLocation
    splits: SplitsConfig = Field(default_factory=SplitsConfig)
    reading: ReadingConfig = Field(default_factory=ReadingConfig)

    def valid_fraction(self, source: SourceConfig) -> float:
        """Share of a source's records for validation."""
        return self.splits.valid if source.valid_fraction is None else source.valid_fraction

    def test_fraction(self, source: SourceConfig) -> float:
        """Share of a source's records for test."""
        # What is held out for validation altogether leaves nothing for the common share.
        common = min(self.splits.test, 1 - self.valid_fraction(source))
        return common if source.test_fraction is None else source.test_fraction

    def held_out(self, source: SourceConfig) -> bool:
        """Whether no record of a source is for training."""
        return self.valid_fraction(source) + self.test_fraction(source) >= 1

    def on_error(self, source: SourceConfig) -> OnError:
        """What to do about a record of a source that cannot be used."""
        return source.on_error or self.reading.on_error

    def check_sources(self, sources: Iterable[SourceConfig]) -> None:
        """Refuse two sources of one name, and fractions that are more than all of a source."""
        names: set[str] = set()
        for source in sources:
            if source.name in names:
                raise ValueError(f"sources: two of the name {source.name!r}")
            names.add(source.name)
            if self.valid_fraction(source) + self.test_fraction(source) > 1:
                raise ValueError(
                    f"source {source.name!r}: {self.valid_fraction(source):g} for validation and "
                    f"{self.test_fraction(source):g} for test are more than all of it"
                )


def check_weights(sources: Iterable[SourceConfig], unweighed: Iterable[str]) -> bool:
    """Whether sources have weights: all of them, or none. `unweighed` are names of sources that need one, too."""
    weights = [source.weight for source in sources if source.weight is not None]
    missing = list(unweighed)
    if weights and missing:
        some = ", ".join(repr(name) for name in missing[:3])
        raise ValueError(f"no weight for {some}, while others have one; 0 leaves a source out")
    if weights and not any(weights):
        raise ValueError("the weights of all sources are 0")
    return bool(weights)


def check_phase_ends(phases: Iterable[PhaseConfig], key: str) -> None:
    """Refuse phases that do not divide the whole training."""
    ends = [phase.until for phase in phases]
    if ends != sorted(set(ends)) or ends[-1:] != [1.0]:
        raise ValueError(f"{key}: `until` must rise from phase to phase and end at 1.0, not {ends}")


def named(sources: list[Any], fallback: str) -> list[Any]:
    """Sources as mappings: a string is a path. Those without a name get one, each another."""
    entries = [{"paths": [source]} if isinstance(source, str) else source for source in sources]
    names = {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict) and "name" not in entry:
            base = name = name_of(entry.get("paths"), fallback)
            count = 1
            while name in names:
                count += 1
                name = f"{base}-{count}"
            names.add(name)
            entry = {"name": name, **entry}
        result.append(entry)
    return result


def name_of(paths: Any, fallback: str) -> str:
    """A name from the first path: the file's or folder's, of a glob its folder's, or what an address ends in."""
    location = paths[0] if isinstance(paths, list) and paths and isinstance(paths[0], str) else ""
    scheme, _, rest = location.rpartition("://")
    if scheme == "hf":
        name = rest.partition("@")[0].removeprefix("datasets/").partition("/")[2].replace(":", "-").replace("/", "-")
    elif TO_COME in location:
        name = fallback
    else:
        whole = rest if scheme else str(expanded(location).absolute())
        plain = [part for part in whole.split("/") if part and not glob.has_magic(part)]
        name = re.sub(_SUFFIXES, "", plain[-1]) if plain else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:120] or fallback
