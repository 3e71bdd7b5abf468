"""Datasets of the Hugging Face Hub: an address becomes files at one commit, and those are read in ranges.

    hf://ORG/NAME[:CONFIG][/SPLIT][@REVISION]        what the dataset's card calls so
    hf://datasets/ORG/NAME[@REVISION][/PATH]         files of its repository: one, a glob (`**` included) or a folder

CONFIG: one of the card's `configs`; without it the default one, as `datasets` chooses it: the only one, the one named
`default`, or the one marked `default: true`. SPLIT: without it `train`; where there is no `train`, the only split.
What follows the `@` is REVISION: a branch, tag, commit or `refs/pr/N`; without it `main`. In the second form it holds
no slash unless it is `refs/pr/N` or `refs/convert/NAME`.

    hf://nvidia/Nemotron-CC-v2:High-Quality@main
    hf://org/name:config/validation
    hf://datasets/org/name/data/*.parquet

The revision is resolved once, to a commit, and files are named with it: `hf://datasets/ORG/NAME@COMMIT/PATH`. Which
files a split consists of follows the rules of the `datasets` library
(huggingface.co/docs/hub/datasets-data-files-configuration): `configs` of the card's YAML with their `data_files`
patterns, else names of folders and files (`data/train-00000-of-00002.parquet`, `test/…`, `dev.jsonl`). Code of a
dataset is never run: one that needs its loading script is refused.

huggingface_hub makes the requests: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their meaning. A file in the
local cache is read from there. Where the Hub cannot be reached, a dataset that the cache holds
(`hf download ORG/NAME --repo-type dataset`) is listed from it.

The rules are written out here because `datasets` lists only formats that it loads itself (no WARC), one format a
config, and follows a card to files of other hosts. HfFileSystem takes whatever a server answers to its range request.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import yaml

from nemo_runspec.errors import RunFailed, UserError, did_you_mean, nearest
from nemo_runspec.installation import install_line
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.ranges import BUGS, TRANSIENT_STATUS, StoredObject, changed_error, range_stream, retried
from nemotron.kit.hub import what_failed

GRAMMAR = "hf://ORG/NAME[:CONFIG][/SPLIT][@REVISION] or hf://datasets/ORG/NAME[@REVISION]/PATH"
_FILES = re.compile(
    r"datasets/(?P<repo>[^/@:]+/[^/@:]+)(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.+))?"
)
_DATASET = re.compile(
    r"(?P<repo>[^/@:]+/[^/@:]+)(?::(?P<config>[^/@:]+))?(?:/(?P<split>[^/@:]+))?(?:@(?P<revision>[^@]+))?"
)
_TIMEOUT = 60.0  # seconds
_ATTEMPTS = 3  # of a request that the client does not retry
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)

# The rules by which `datasets` finds splits in the names of files (its data_files.py documents them with examples).
_SHARDED = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SPLIT_NAME = re.compile(r"\w+(?:\.\w+)*")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = "[-._ 0-9]"
_IN_FOLDER_NAMES = ("**/{word}/**", "**/{word}{sep}*/**", "**/*{sep}{word}/**", "**/*{sep}{word}{sep}*/**")
_IN_FILE_NAMES = ("**/{word}{sep}*", "**/*{sep}{word}{sep}*")
_NEVER_DATA = (
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """What an hf:// address says. `path` is set in the second form only."""

    repo: str
    config: str | None = None
    split: str | None = None
    revision: str = "main"
    path: str | None = None


@dataclass(frozen=True, slots=True)
class HubConfig:
    """A config of a dataset: split -> patterns relative to the repository's root."""

    name: str
    splits: Mapping[str, Sequence[str]]
    default: bool = False


@dataclass(frozen=True, slots=True)
class _Repository:
    """A dataset's repository at a commit. `files`: path -> size in bytes and blob id."""

    name: str
    commit: str
    files: Mapping[str, tuple[int, str]]

    def objects(self, paths: Iterable[str]) -> list[StoredObject]:
        prefix = f"hf://datasets/{self.name}@{self.commit}"
        return [StoredObject(f"{prefix}/{path}", *self.files[path]) for path in paths]


def parse_hub_address(location: str) -> HubAddress:
    """The parts of an address. UserError: it follows neither form."""
    rest = location.removeprefix("hf://")
    pattern = _FILES if rest.startswith("datasets/") else _DATASET
    parts = pattern.fullmatch(rest)
    if parts is None:
        raise UserError(f"{location}: not the address of a dataset", f"it has the form {GRAMMAR}")
    return HubAddress(**{name: text for name, text in parts.groupdict().items() if text is not None})


def find_hub_objects(location: str) -> list[StoredObject]:
    """The files that an hf:// address stands for, at the commit that its revision is now.

    UserError, in one line: no such dataset, config, split, revision or file, each with the nearest name; a gated one
    without access; one with a loading script; the Hub out of reach and no complete copy in the cache.
    """
    address = parse_hub_address(location)
    repository = _open_repository(address)
    if address.path is not None:
        return repository.objects(_matching_path(address, list(repository.files)))
    script = f"{address.repo.split('/')[1]}.py"
    if script in repository.files:
        raise UserError(
            f"hf://{address.repo} needs its loading script {script}, and no code of a dataset is run",
            f"name its files, hf://datasets/{address.repo}/PATH, or the Hub's own copy, @refs/convert/parquet",
        )
    config = _choose_config(address, hub_configs(_card(repository), list(repository.files)))
    split = _choose_split(address, config)
    paths = dict.fromkeys(path for pattern in config.splits[split] for path in match(pattern, repository.files))
    if not paths:
        raise UserError(f"hf://{address.repo}: no file matches {', '.join(config.splits[split])} (split {split!r})")
    return repository.objects(paths)


def open_hub_file(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a file `hf://datasets/ORG/NAME@COMMIT/PATH`, from the cache if it is there, else in ranges.

    RunFailed: access denied, the Hub out of reach, a cached copy that is not whole.
    """
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    address = parse_hub_address(file.uri)
    assert address.path is not None
    cached = try_to_load_from_cache(address.repo, address.path, revision=address.revision, repo_type="dataset")
    if isinstance(cached, str):
        if Path(cached).stat().st_size != file.size:
            raise RunFailed(f"{file.uri}: the copy in the local cache is not whole: {cached}", "delete it")
        return Path(cached).open("rb")
    url = hf_hub_url(address.repo, address.path, repo_type="dataset", revision=address.revision)

    def fetch(begin: int, end: int) -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            response = http_backoff("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True)
            hf_raise_for_status(response)
        except BUGS:
            raise
        except Exception as error:
            raise RunFailed(f"{file.uri}: {what_failed(error)}") from error
        if response.headers.get("Content-Range", "").rpartition("/")[2] not in (str(file.size), ""):
            raise changed_error(file)
        if response.status_code == 200 and (begin, end) != (0, file.size):
            raise RunFailed(f"{file.uri}: the server does not serve ranges of bytes", _download(address.repo))
        return bytes(response.content)

    return range_stream(file, fetch, end)


# --- The card's configs, and the names of files -----------------------------------------------------------------------


def hub_configs(card: Mapping[str, Any], paths: Sequence[str]) -> list[HubConfig]:
    """The configs of a dataset with this card (its YAML) and these files; UserError for a card that is not valid."""
    declared = card.get("configs")
    if not declared:
        return [HubConfig("default", conventional_splits(paths), default=True)]
    configs = []
    try:
        for entry in declared:
            folder = posixpath.normpath(str(entry.get("data_dir") or ".")).removeprefix(".").strip("/")
            if entry.get("data_files") is not None:
                patterns = _declared_splits(entry["data_files"])
            elif folder:
                begin = f"{folder}/"
                patterns = conventional_splits([path.removeprefix(begin) for path in paths if path.startswith(begin)])
            else:
                patterns = conventional_splits(paths)
            splits = {split: [_in_repository(folder, path) for path in paths] for split, paths in patterns.items()}
            name = str(entry["config_name"])
            configs.append(HubConfig(name, splits, name == "default" or bool(entry.get("default"))))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(f"the dataset's card has `configs` that are not valid: {error!r}") from error
    if len(configs) == 1:
        return [HubConfig(configs[0].name, configs[0].splits, default=True)]
    return configs


def _in_repository(folder: str, pattern: str) -> str:
    """A pattern relative to the repository's root. UserError: it leads out of it."""
    whole = posixpath.normpath(posixpath.join(folder, pattern))
    if ":/" in whole or whole.startswith(("/", "..")):
        raise UserError(f"the dataset's card names files elsewhere: {whole}")
    return whole


def _declared_splits(data_files: Any) -> dict[str, list[str]]:
    """The card's `data_files` in one form; without split names, everything is `train`."""
    if isinstance(data_files, str):
        return {"train": [data_files]}
    if all(isinstance(entry, str) for entry in data_files):
        return {"train": list(data_files)}
    splits: dict[str, list[str]] = {}
    for entry in data_files:
        path = entry["path"]
        if str(entry["split"]) in splits:
            raise ValueError(f"split {entry['split']!r} twice")
        splits[str(entry["split"])] = [path] if isinstance(path, str) else [str(pattern) for pattern in path]
    return splits


def conventional_splits(paths: Sequence[str]) -> dict[str, list[str]]:
    """split -> patterns, from the names of files: shards, else folders, else file names, else everything is `train`."""
    sharded = {parts["split"] for path in paths if _is_data(path, "data/*") and (parts := _SHARDED.fullmatch(path))}
    if sharded:
        if wrong := [split for split in sorted(sharded) if not _SPLIT_NAME.fullmatch(split)]:
            raise UserError(f"{wrong[0]!r}, as its files are named, is not the name of a split")
        order = [*(split for split in _SPLIT_WORDS if split in sharded), *sorted(sharded - set(_SPLIT_WORDS))]
        digits = "[0-9]" * 5
        return {split: [f"data/{split}-{digits}-of-{digits}*.*"] for split in order}
    for forms in (_IN_FOLDER_NAMES, _IN_FILE_NAMES):
        patterns = {
            split: [form.format(word=word, sep=_SEPARATORS) for word in words for form in forms]
            for split, words in _SPLIT_WORDS.items()
        }
        matching = {split: forms for split, forms in patterns.items() if any(match(form, paths) for form in forms)}
        if matching:
            return matching
    return {"train": ["**"]} if match("**", paths) else {}


def match(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern of a card stands for, sorted. Hidden ones and `__folders` only if it names them."""
    from fsspec.utils import glob_translate

    regex = re.compile(glob_translate(pattern))
    return sorted(path for path in paths if (path == pattern or regex.match(path)) and _is_data(path, pattern))


def _is_data(path: str, pattern: str) -> bool:
    """Whether a file that matches is data: not one of the repository's own, not hidden unless the pattern says so."""
    if PurePosixPath(path).name in _NEVER_DATA and PurePosixPath(pattern).name != PurePosixPath(path).name:
        return False

    def hidden(text: str) -> int:
        return sum(part.startswith(".") for part in PurePosixPath(text).parts)

    def special(text: str) -> int:
        return sum(part.startswith("__") for part in PurePosixPath(text).parent.parts)

    return hidden(path) == hidden(pattern) and special(path) == special(pattern)


def _choose_config(address: HubAddress, configs: Sequence[HubConfig]) -> HubConfig:
    names = [config.name for config in configs]
    if address.config is not None:
        for config in configs:
            if config.name == address.config:
                return config
        raise UserError(
            f"hf://{address.repo} has no config {address.config!r}",
            did_you_mean(address.config, names, "its configs"),
        )
    defaults = [config for config in configs if config.default]
    if len(defaults) != 1:
        raise UserError(
            f"hf://{address.repo} has {len(configs)} configs and no default one",
            f"name one, as hf://{address.repo}:{names[0]}; its configs: {', '.join(names)}",
        )
    return defaults[0]


def _choose_split(address: HubAddress, config: HubConfig) -> str:
    splits = list(config.splits)
    if not splits:
        raise UserError(f"hf://{address.repo} holds no data files")
    if address.split is not None:
        if address.split not in splits:
            hint = did_you_mean(address.split, splits, "its splits")
            raise UserError(f"hf://{address.repo} (config {config.name!r}) has no split {address.split!r}", hint)
        return address.split
    if "train" in splits:
        return "train"
    if len(splits) > 1:
        raise UserError(
            f"hf://{address.repo} (config {config.name!r}) has no split 'train' and {len(splits)} others",
            f"name one, as hf://{address.repo}:{config.name}/{splits[0]}; its splits: {', '.join(splits)}",
        )
    return splits[0]


def _matching_path(address: HubAddress, paths: list[str]) -> list[str]:
    assert address.path is not None
    path = address.path.rstrip("/")
    below = (file for file in paths if file.startswith(f"{path}/") and _is_data(file, f"{path}/*"))
    matching = match(path, paths) or sorted(below)
    if not matching:
        near = nearest(path, {*paths, *(str(PurePosixPath(file).parent) for file in paths)} - {"."})
        hint = f"did you mean hf://datasets/{address.repo}/{near}?" if near else None
        raise UserError(f"hf://datasets/{address.repo}@{address.revision}: no file {path}", hint)
    return matching


# --- The Hub and its cache --------------------------------------------------------------------------------------------


def _open_repository(address: HubAddress) -> _Repository:
    """The repository at the commit that the revision is now: asked of the Hub, or of the cache where there is none."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise UserError(
            f"hf://{address.repo}: reading from the Hub needs huggingface_hub",
            install_line("hf"),
        ) from error
    api, repo = HfApi(), address.repo
    what = f"hf://{repo}"
    try:
        info = retried(lambda: api.dataset_info(repo, revision=address.revision, timeout=_TIMEOUT), _pause, _ATTEMPTS)
        assert info.sha is not None
        if info.gated:  # whose files are listed to everybody
            retried(lambda: api.auth_check(repo, repo_type="dataset"), _pause, _ATTEMPTS)
        return _Repository(repo, info.sha, _files_at(repo, info.sha))
    except GatedRepoError as error:
        raise UserError(
            f"{what} is gated: access denied", f"accept its terms at {api.endpoint}/datasets/{repo}, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        datasets = _names(lambda: (info.id for info in api.list_datasets(author=repo.split("/")[0], limit=1000)))
        near = nearest(repo, datasets)
        hint = f"did you mean hf://{near}?" if near and near != repo else "a private one needs HF_TOKEN"
        raise UserError(f"{what}: no such dataset on {api.endpoint}", hint) from error
    except RevisionNotFoundError as error:
        refs = _names(lambda: _ref_names(api.list_repo_refs(repo, repo_type="dataset")))
        raise UserError(f"{what} has no revision {address.revision!r}", did_you_mean(address.revision, refs)) from error
    except HFValidationError as error:
        raise UserError(f"{what}: not the name of a dataset", f"it has the form {GRAMMAR}") from error
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise UserError(f"{what}: the Hub refuses the token", "HF_TOKEN, or hf auth login") from error
        if error.response.status_code < 500:
            raise UserError(f"{what}: {what_failed(error)}") from error
        return _cached_repository(address, error)
    except BUGS:
        raise
    except Exception as error:  # no connection, a timeout, offline mode
        return _cached_repository(address, error)


@functools.lru_cache(maxsize=32)
def _files_at(repo: str, commit: str) -> Mapping[str, tuple[int, str]]:
    """Path -> size and blob id of a commit's files. Kept: a blend names the configs of one dataset one by one."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True)
    return {entry.path: (entry.size, entry.blob_id) for entry in tree if isinstance(entry, RepoFile)}


def _cached_repository(address: HubAddress, reason: Exception) -> _Repository:
    """What the local cache holds of it, if a tree listing says that this is all. UserError: not there, or not whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        from huggingface_hub import get_cached_repo_tree  # since 2.4

        folder = snapshot_download(address.repo, repo_type="dataset", revision=address.revision, local_files_only=True)
        tree = get_cached_repo_tree(address.repo, repo_type="dataset", revision=address.revision)
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError) as error:
        raise UserError(
            f"hf://{address.repo}: {what_failed(reason)}, and the local cache has no complete copy of"
            f" {address.revision}",
            _download(address.repo),
        ) from error
    return _Repository(address.repo, Path(folder).name, {file.path: (file.size, file.blob_id) for file in tree})


def _card(repository: _Repository) -> dict[str, Any]:
    """The YAML of the dataset's card; what .huggingface.yaml says comes before it, as in `datasets`."""
    texts = []
    if "README.md" in repository.files and (front := _FRONT_MATTER.match(_text_of(repository, "README.md"))):
        texts.append(front[1])
    if ".huggingface.yaml" in repository.files:
        texts.append(_text_of(repository, ".huggingface.yaml"))
    card: dict[str, Any] = {}
    for text in texts:
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            problem = str(error).split("\n")[0]
            raise UserError(f"hf://{repository.name}: the dataset's card is not valid YAML: {problem}") from error
        card.update(value if isinstance(value, dict) else {})
    return card


def _text_of(repository: _Repository, path: str) -> str:
    size, blob = repository.files[path]
    file = SourceFile(repository.objects([path])[0].uri, size, blob, "text", "none")
    try:
        with open_hub_file(file) as stream:
            return stream.read().decode("utf-8", errors="replace")
    except RunFailed as error:
        raise UserError(error.message, error.hint) from error


def _pause(error: Exception) -> float | None:
    """0 where the Hub may answer the next request; None where it refuses, or where it is switched off."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    refuses = isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT_STATUS
    return None if refuses or isinstance(error, (OfflineModeIsEnabled, ValueError, *BUGS)) else 0.0


def _names(request: Callable[[], Iterable[str]]) -> list[str]:
    """Names for a hint, none where they cannot be had: a hint is not worth an error of its own."""
    try:
        return list(request())
    except Exception:
        return []


def _ref_names(refs: Any) -> list[str]:
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _download(repo: str) -> str:
    return f"hf download {repo} --repo-type dataset"
