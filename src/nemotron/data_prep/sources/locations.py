"""The files behind what a user names, and a file's bytes: on this machine, on object stores, the web and the Hub.

    notes/                a path, a glob (`*`, `**`, `?`, `[ab]`) or a folder of this machine
    s3://BUCKET/KEY       the same three of an object store, through s3fs (extra s3): stores.py
    gs://BUCKET/KEY       the same through gcsfs (extra gs)
    https://HOST/PATH     one file of a web server; http:// only for this machine: web.py
    hf://ORG/NAME         a dataset of the Hugging Face Hub: hub.py

A file's name says its format. Of a file on this machine its first bytes say the compression: a `.jsonl` that is gzip
inside is read as gzip, a `.jsonl.gz` that was unpacked on its way as plain. What is in a folder and is not read (other
suffixes, hidden files) is counted, by suffix.

Remote files are read in ranges of bytes (ranges.py), without a copy on this machine. Credentials come from where the
client libraries look for them: environment, their own files, the machine's role. An address with credentials in it
(`https://user:password@…`) is refused. A signed address is kept whole in plans, since reading needs it; messages, row
ids and lineage show it without its query string.

A file that changes is noticed by its version, which is compared with every range that is read: the ETag of S3, the
generation of Google Cloud Storage, on the web the ETag or else Last-Modified. Where a web server sends neither, only a
change of length is noticed.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, Literal
from urllib.parse import unquote

from nemo_runspec.errors import RunFailed, UserError, nearest
from nemo_runspec.secrets import has_login
from nemo_runspec.user_files import files_below, files_of, local_path, names_matching
from nemotron.data_prep.sources.files import (
    BEGIN_BYTES,
    COMPRESSIBLE,
    COMPRESSION_SUFFIXES,
    FORMATS,
    MAGIC_BYTES,
    SETTINGS_TOO,
    SUFFIXES,
    Format,
    SourceFile,
    compression_of,
    format_of,
    is_json_array,
    redact,
)
from nemotron.data_prep.sources.ranges import StoredObject, changed_error, range_stream
from nemotron.data_prep.sources.stores import CREDENTIALS, find_in_store, store_fetch

if TYPE_CHECKING:
    from nemotron.kit import Source

SCHEMES = ("s3", "gs", "https", "http", "hf")
_ARRAY_OF_OBJECTS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")

_KNOWN_BY: Mapping[Format, str] = {  # in short, for messages
    "jsonl": ".jsonl",
    "json": ".json",
    "csv": ".csv, .tsv",
    "parquet": ".parquet",
    "arrow": ".arrow",
    "text": ".txt, .md, source code",
    "warc": ".warc, .wet",
}


def list_files(
    locations: Sequence[str],
    formats: Sequence[Format] = FORMATS,
    passed_over: Counter[str] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
) -> list[SourceFile]:
    """The files behind paths, globs (`**` included), folders and addresses; sorted, each file once.

    A folder stands for all files in it, however deep; hidden files and folders (`.git`) are left out, links that lead
    round in a circle end where they began, and plain JSON and CSV are read where nothing else in it is. What else a
    folder or glob holds is counted by suffix in `passed_over`, or named in one line on stderr where that is None; so is
    a file or folder below that may not be read, where `on_error` is `skip`.

    UserError: a path that does not exist or, under `stop`, cannot be listed; a glob or folder without a file that is
    read; a named file of an unknown type.
    """
    counts: Counter[str] = Counter() if passed_over is None else passed_over
    listed: dict[str, SourceFile] = {}
    for location in locations:
        try:
            if "://" in location and not location.startswith("file://"):
                files = _remote(location, formats, counts)
            else:
                files = _local(location, formats, counts, on_error)
        except OSError as error:  # of a folder on the way, mostly
            raise UserError(f"{location}: {error.strerror or error}") from error
        listed.update((file.uri, file) for file in files)
    unique = _without_links([listed[uri] for uri in sorted(listed)], counts)
    if passed_over is None and counts:
        print(not_read(counts, formats), file=sys.stderr)
    return unique


def check_not_empty(source: str, files: Sequence[SourceFile]) -> None:
    """UserError for a source whose files have not a byte: seen before any work is done."""
    if not any(file.size for file in files):
        raise UserError(f"source {source!r} is empty: 0 bytes in {', '.join(file.name for file in files[:3])}")


def described(passed_over: Mapping[str, int]) -> str:
    """Counts of what was passed over, for people, the most frequent first."""
    ranked = sorted(passed_over.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} x {kind}" for kind, count in ranked)


def not_read(passed_over: Mapping[str, int], formats: Iterable[Format]) -> str:
    """The line that says what was passed over, and how JSON and CSV beside other files are read after all."""
    kinds = sorted(
        kind
        for kind in passed_over
        if (known := format_of(f"x{kind}")) and known[0] in SETTINGS_TOO and known[0] in formats
    )
    remedy = f"; where {' and '.join(kinds)} are data, name them: FOLDER/**/*{kinds[0]}" if kinds else ""
    return f"not read: {described(passed_over)}{remedy}"


def open_binary(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a file's bytes as they are stored.

    `end`: the byte before which the reader will probably stop, so that less is fetched ahead.

    Raises:
        OSError: a file of this machine is gone or cannot be read.
        RunFailed: it is another than the one that was listed; a remote one is gone, or its store does not answer.
    """
    if file.uri.startswith("hf://"):
        from nemotron.data_prep.sources.hub import open_hub_file

        return open_hub_file(file, end)
    if file.uri.startswith(("https://", "http://")):
        from nemotron.data_prep.sources.web import web_fetch

        return range_stream(file, web_fetch(file), end)
    if not file.is_local:
        return range_stream(file, store_fetch(file), end)
    stream = open(file.uri, "rb", buffering=1 << 18)  # noqa: PTH123, SIM115  the caller closes it
    try:
        check_unchanged(stream, file)
    except RunFailed:
        stream.close()
        raise
    return stream


def check_unchanged(stream: BinaryIO, file: SourceFile) -> None:
    """RunFailed: the open file of this machine is no longer what was listed; it may have been cut while it was read."""
    status = os.fstat(stream.fileno())
    if (status.st_size, str(status.st_mtime_ns)) != (file.size, file.version):
        raise changed_error(file)


def lineage_sources(files: Sequence[SourceFile], role: str) -> list[Source]:
    """Every file for the lineage of what is made of them: address, sha256 and, behind its `role`, a description.

    A remote file has no sha256 (it is never here as a whole), but the version that its store gives it; so has one that
    cannot be read or has changed.
    """
    from nemotron.kit import Source

    sources = []
    for file in files:
        sha256 = None
        detail = f"{role}, {file.size} bytes"
        if file.is_local:
            try:
                with open_binary(file) as stream:
                    sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            except OSError as error:
                detail += f", not readable: {error.strerror}"
            except RunFailed:
                detail += ", changed after it was listed"
        else:
            detail += f", version {file.version}"
        sources.append(Source(name=file.name, sha256=sha256, detail=detail))
    return sources


# --- On this machine --------------------------------------------------------------------------------------------------


def _local(location: str, formats: Sequence[Format], counts: Counter[str], on_error: str) -> list[SourceFile]:
    path = local_path(location)
    if path.is_file():
        file = _source_file(str(path), formats)
        if isinstance(file, str):
            raise _unknown_type(location, path.name, formats)
        return [file]

    def skip(error: OSError) -> None:
        if on_error == "stop":
            hint = "make it readable; a source's `on_error: skip` leaves such files and folders out and counts them"
            raise UserError(f"{error.filename}: {error.strerror}", hint) from error
        counts["unreadable folder" if Path(error.filename).is_dir() else "unreadable file"] += 1

    is_folder = path.is_dir()
    names: Iterable[str] = files_below(path, counts, skip) if is_folder else files_of(location)
    if not is_folder and "**" not in location:  # with `**`, what is in the folders matches, too
        folders = sum(Path(name).is_dir() for name in names_matching(location))
        counts.update({"folder": folders} if folders else {})
    files = []
    for name in names:
        try:
            file = _source_file(name, formats)
        except OSError as error:
            skip(error)
            continue
        if not isinstance(file, SourceFile):
            counts[file] += 1
        else:
            files.append(file)
    if not files:
        raise _nothing_readable(location, formats, counts)
    return _without_settings(files, counts) if is_folder else files


def _without_settings(files: list[SourceFile], counts: Counter[str]) -> list[SourceFile]:
    """Of a folder's files those that are data: plain `SETTINGS_TOO` only where nothing else is. The others are
    counted."""
    kinds = {file.uri: known for file in files if (known := format_of(file.name)) and known[0] in SETTINGS_TOO}
    if len(kinds) == len(files):
        return files
    settings = {uri for uri, (_, compression) in kinds.items() if compression == "none"}
    counts.update(_suffix(file.name) for file in files if file.uri in settings)
    return [file for file in files if file.uri not in settings]


def _source_file(name: str, formats: Sequence[Format]) -> SourceFile | str:
    """A file as it is now, or the kind under which it is counted instead."""
    known = format_of(name)
    if known is None or known[0] not in formats:
        return _suffix(name) or "no suffix"
    try:
        status = os.stat(name)  # noqa: PTH116
    except FileNotFoundError:
        return "link that leads nowhere"
    if not stat.S_ISREG(status.st_mode):
        return "pipe, socket or device"
    file = SourceFile(name, status.st_size, str(status.st_mtime_ns), *known)
    begin = b""
    if file.format in COMPRESSIBLE:
        with contextlib.suppress(OSError), open(name, "rb") as stream:  # noqa: PTH123  its reader will meet the error
            begin = stream.read(BEGIN_BYTES)
    if len(begin) >= MAGIC_BYTES:
        file = replace(file, compression=compression_of(begin[:MAGIC_BYTES]))
    if file.format == "json" and file.compression == "none" and not is_json_array(begin):
        return replace(file, format="jsonl")  # which can be cut
    if file.format == "jsonl" and file.compression == "none" and "json" in formats and _ARRAY_OF_OBJECTS.match(begin):
        return file if _has_lists_for_lines(name) else replace(file, format="json")
    return file


def _has_lists_for_lines(name: str) -> bool:
    """Whether a file that begins as an array of objects is JSON Lines all the same, of which its reader says more."""
    with open(name, "rb") as stream:  # noqa: PTH123
        line, more = stream.readline(1 << 20), stream.read(BEGIN_BYTES).strip()
    with contextlib.suppress(ValueError, RecursionError):
        return bool(more) and isinstance(json.loads(line), list)
    return False


def _without_links(files: Sequence[SourceFile], counts: Counter[str]) -> list[SourceFile]:
    """The files without those that are another name (a link) of one before."""
    identities: set[tuple[int, int]] = set()
    unique = []
    for file in files:
        if file.is_local:
            status = os.stat(file.uri)  # noqa: PTH116
            identity = status.st_dev, status.st_ino
            if identity in identities:
                counts["second name of a file"] += 1
                continue
            identities.add(identity)
        unique.append(file)
    return unique


# --- Elsewhere --------------------------------------------------------------------------------------------------------


def _remote(location: str, formats: Sequence[Format], counts: Counter[str]) -> list[SourceFile]:
    objects = find_objects(location)
    files = []
    for stored in objects:
        name = unquote(redact(stored.uri)).rsplit("/", 1)[-1]
        known = format_of(name)
        if known is not None and known[0] in formats:
            files.append(SourceFile(stored.uri, stored.size, stored.version, *known))
        elif len(objects) == 1:
            raise _unknown_type(redact(location), name, formats)
        else:
            counts[_suffix(name) or "no suffix"] += 1
    if not files:
        raise _nothing_readable(redact(location), formats, counts)
    return files if glob.has_magic(location) else _without_settings(files, counts)


def find_objects(location: str) -> list[StoredObject]:
    """What an address stands for, sorted by name: one file, the files that a glob matches, or all files of a folder.

    UserError, in one line: an unknown kind of address, nothing is there, access is denied, there are no credentials, no
    such host or no client library.
    """
    scheme = location.partition("://")[0]
    if scheme not in SCHEMES:
        near = nearest(scheme, SCHEMES)
        raise UserError(
            f"{redact(location)}: cannot read from {scheme}://",
            f"did you mean {near}://?" if near else f"known: {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    if scheme == "hf":
        from nemotron.data_prep.sources.hub import find_hub_objects

        return find_hub_objects(location)
    if has_login(location):
        raise UserError(f"{redact(location)}: credentials have no place in an address", CREDENTIALS.get(scheme))
    if scheme in ("https", "http"):
        from nemotron.data_prep.sources.web import find_on_web

        return [find_on_web(location)]
    return find_in_store(location)


# --- What is not read -------------------------------------------------------------------------------------------------


def _suffix(name: str) -> str:
    """The end of a name that tells its type, in lower case: `.csv`, `.csv.gz`."""
    path = PurePath(name.lower())
    return PurePath(path.stem).suffix + path.suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix


def _unknown_type(location: str, name: str, formats: Sequence[Format]) -> UserError:
    suffixes = [suffix for suffix, suffix_format in SUFFIXES.items() if suffix_format in formats]
    known = ", ".join(suffixes if len(suffixes) <= 12 else [*suffixes[:12], "…"])
    also = ", each also with .gz or .zst" if set(formats) & set(COMPRESSIBLE) else ""
    return UserError(f"cannot read {location}: unknown file type {_suffix(name)!r}", f"known: {known}{also}")


def _nothing_readable(location: str, formats: Sequence[Format], counts: Mapping[str, int]) -> UserError:
    known = ", ".join(_KNOWN_BY[known_format] for known_format in FORMATS if known_format in formats)
    others = f", only {described(counts)}" if counts else ""
    return UserError(f"{location} holds no file that is read{others}", f"read are: {known}")
