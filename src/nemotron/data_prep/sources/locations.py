"""The files behind what a user names: paths, globs, folders of mixed files, and addresses of stores and the Hub.

A file's name says its format. Of a file on this machine its first bytes say the compression: a `.jsonl` that is gzip
inside is read as gzip, a `.jsonl.gz` that was unpacked on its way as plain. What is in a folder and is not read (other
suffixes, hidden files) is counted, by suffix.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import BinaryIO, Literal
from urllib.parse import unquote

from nemo_runspec.errors import UserError
from nemo_runspec.user_files import files_below, local_path, no_such_file
from nemotron.data_prep.sources.files import (
    COMPRESSIBLE,
    COMPRESSION_SUFFIXES,
    FORMATS,
    MAGIC_BYTES,
    SUFFIXES,
    Compression,
    Format,
    SourceFile,
    compression_of,
    format_of,
    is_address,
    redact,
)

_KNOWN_BY: Mapping[Format, str] = {  # in short, for messages
    "jsonl": ".jsonl",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "text": ".txt, .md, source code",
    "warc": ".warc, .wet",
}
_NOT_ALLOWED = "make it readable; a source's `on_error: skip` leaves such out and counts them"


def list_files(
    locations: Sequence[str],
    formats: Sequence[Format] = FORMATS,
    passed_over: Counter[str] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
) -> list[SourceFile]:
    """The files behind paths, globs (`**` included), folders and addresses; sorted, each file once.

    A folder stands for all in it, however deep; hidden files and folders (`.git`) are left out, and links that lead
    round in a circle end where they began. What a folder or a glob holds besides is counted in `passed_over`, by
    suffix; without one a line on stderr says it. So is a folder or file below that may not be looked at, where
    `on_error` is `skip`.

    UserError: a path that does not exist or, under `stop`, cannot be listed, a glob or folder without a file that is
    read, a named file of an unknown type.
    """
    counts: Counter[str] = Counter() if passed_over is None else passed_over
    found: dict[str, SourceFile] = {}
    for location in locations:
        before = len(found), counts.total()
        try:
            if _leaves(location):
                listed = _remote(location, formats, counts)
            else:
                listed = _local(location, formats, counts, on_error)
        except OSError as error:  # of a folder on the way, mostly
            raise UserError(f"{location}: {error.strerror or error}") from error
        for file in listed:
            found[file.uri] = file
        if (len(found), counts.total()) == before and not listed:
            raise UserError(f"no file in {location}")
    files = _each_once([found[uri] for uri in sorted(found)], counts)
    if passed_over is None and counts:
        print(f"not read: {described(counts)}", file=sys.stderr)
    return files


def described(passed_over: Mapping[str, int]) -> str:
    """Counts of what was passed over, for people, the most frequent first."""
    ranked = sorted(passed_over.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} x {kind}" for kind, count in ranked)


def open_binary(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a file's bytes as they are stored.

    `end`: the byte before which the reader will probably stop, so that less is fetched ahead.

    Raises:
        OSError: a file of this machine is gone, cannot be read, or is another than the one that was listed.
        RunFailed: the same of a remote one, or its store does not answer.
    """
    if not file.is_local:
        from nemotron.data_prep.sources.remote import open_remote

        return open_remote(file, end)
    stream = open(file.uri, "rb", buffering=1 << 18)  # noqa: PTH123, SIM115  the caller closes it
    status = os.fstat(stream.fileno())
    if (status.st_size, str(status.st_mtime_ns)) != (file.size, file.version):
        stream.close()
        raise OSError(None, "changed after it was listed", file.uri)
    return stream


def file_digests(files: Sequence[SourceFile]) -> list[dict[str, str | None]]:
    """Address, sha256 and a description of every file, for the lineage of what is made of them.

    A remote file has no sha256 (it is never here as a whole), but the version that its store gives it; so has one that
    cannot be read.
    """
    digests: list[dict[str, str | None]] = []
    for file in files:
        sha256 = None
        detail = f"{file.size} bytes"
        if file.is_local:
            try:
                with open_binary(file) as stream:
                    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            except OSError as error:
                detail += f", not readable: {error.strerror}"
        else:
            detail += f", version {file.version}"
        digests.append({"name": file.name, "sha256": sha256, "detail": detail})
    return digests


# --- Here -------------------------------------------------------------------------------------------------------------


def _leaves(location: str) -> bool:
    return is_address(location) and not location.startswith("file://")


def _local(location: str, formats: Sequence[Format], counts: Counter[str], on_error: str) -> list[SourceFile]:
    path = local_path(location)
    if path.is_dir():
        names = _below(path, counts, on_error)
        files = [file for name in names if (file := _in_folder(name, formats, counts, on_error))]
        if not files:
            _nothing_readable(location, formats, counts)
        return files
    if glob.has_magic(location) and not path.exists():
        return _matching(location, path, formats, counts, on_error)
    if not path.is_file():
        if path.exists():
            raise UserError(f"{location} is neither a file nor a folder")
        raise no_such_file(location)
    return [_named(path, location, formats)]


def _matching(
    location: str, path: Path, formats: Sequence[Format], counts: Counter[str], on_error: str
) -> list[SourceFile]:
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
    if not names:
        raise UserError(f"no file matches {location}")
    files = []
    for name in sorted(names):
        if Path(name).is_dir():
            if "**" not in location:  # else what is in it matches, too
                counts["folder"] += 1
        elif file := _in_folder(name, formats, counts, on_error, json_too=True):
            files.append(file)
    if not files:
        if all(Path(name).is_dir() for name in names):
            raise UserError(f"no file matches {location}", "it matches folders: name them without the glob")
        _named(Path(names[0]), names[0], formats)  # says what is wrong with the first
        _nothing_readable(location, formats, counts)
    return files


def _named(path: Path, location: str, formats: Sequence[Format]) -> SourceFile:
    """A file that the user named: one of another type is an error."""
    known = format_of(path.name)
    if known is None or known[0] not in formats:
        _unknown_type(location, path.name, formats)
    assert known is not None
    try:
        return _source_file(str(path), *known)
    except OSError as error:
        raise UserError(f"{location}: {error.strerror}") from error


def _unknown_type(location: str, name: str, formats: Sequence[Format]) -> None:
    known = [suffix for suffix, known_format in SUFFIXES.items() if known_format in formats]
    shown = known if len(known) <= 12 else [*known[:12], "…"]
    also = ", each also with .gz or .zst" if set(formats) & set(COMPRESSIBLE) else ""
    raise UserError(f"cannot read {location}: unknown file type {_suffix(name)!r}", f"known: {', '.join(shown)}{also}")


def _nothing_readable(location: str, formats: Sequence[Format], counts: Mapping[str, int]) -> None:
    known = ", ".join(_KNOWN_BY[known_format] for known_format in FORMATS if known_format in formats)
    holds = f", only {described(counts)}" if counts else ""
    raise UserError(f"{location} holds no file that is read{holds}", f"read are: {known}")


def _in_folder(
    name: str, formats: Sequence[Format], counts: Counter[str], on_error: str, *, json_too: bool = False
) -> SourceFile | None:
    """A file that was found rather than named; None, and counted, if it is not one to read."""
    known = format_of(name)
    is_json = _suffix(name).startswith(".json") and not _suffix(name).startswith(".jsonl")
    if known is None or known[0] not in formats or (is_json and not json_too):
        counts[_suffix(name) or "no suffix"] += 1
        return None
    try:
        return _source_file(name, *known)
    except FileNotFoundError:
        counts["link that leads nowhere"] += 1
        return None
    except OSError as error:
        if on_error == "stop":
            raise UserError(f"{name}: {error.strerror}", _NOT_ALLOWED) from error
        counts["unreadable file"] += 1
        return None


def _suffix(name: str) -> str:
    """The end of a name that tells its type, in lower case: `.csv`, `.csv.gz`."""
    path = PurePath(name.lower())
    return PurePath(path.stem).suffix + path.suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix


def _source_file(name: str, known: Format, compression: Compression) -> SourceFile:
    status = os.stat(name)  # noqa: PTH116
    file = SourceFile(name, status.st_size, str(status.st_mtime_ns), known, compression)
    if known not in COMPRESSIBLE or status.st_size < MAGIC_BYTES:
        return file
    with contextlib.suppress(OSError), open(name, "rb") as stream:  # noqa: PTH123  who reads it will see the error
        return replace(file, compression=compression_of(stream.read(MAGIC_BYTES)))
    return file


def _below(folder: Path, counts: Counter[str], on_error: str) -> Iterator[str]:
    """Files below a folder; what is left out is counted."""

    def fail(error: OSError) -> None:
        if on_error == "stop":
            raise UserError(f"{error.filename}: {error.strerror}", _NOT_ALLOWED) from error
        counts["unreadable folder"] += 1

    return files_below(folder, counts, fail)


def _each_once(files: list[SourceFile], counts: Counter[str]) -> list[SourceFile]:
    """Leave out a second name (a link) of a file that is there already."""
    seen: set[tuple[int, int]] = set()
    kept = []
    for file in files:
        if file.is_local:
            status = os.stat(file.uri)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen:
                counts["second name of a file"] += 1
                continue
            seen.add((status.st_dev, status.st_ino))
        kept.append(file)
    return kept


# --- Elsewhere --------------------------------------------------------------------------------------------------------


def _remote(location: str, formats: Sequence[Format], counts: Counter[str]) -> list[SourceFile]:
    from nemotron.data_prep.sources.remote import find_objects, is_remote

    is_remote(location)  # UserError: an unknown scheme
    objects = find_objects(location)
    alone = len(objects) == 1
    files = []
    for stored in objects:
        name = unquote(redact(stored.uri)).rsplit("/", 1)[-1]
        known = format_of(name)
        if known is None or known[0] not in formats:
            if alone:
                _unknown_type(redact(location), name, formats)
            counts[_suffix(name) or "no suffix"] += 1
            continue
        files.append(SourceFile(stored.uri, stored.size, stored.version, *known))
    if objects and not files:
        _nothing_readable(redact(location), formats, counts)
    return files
