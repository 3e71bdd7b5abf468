"""Files on object stores and web servers: listed, and read in ranges of bytes without a copy on this machine.

    s3://BUCKET/KEY       a file, a glob (`*`, `**`, `?`, `[ab]`) or a folder, through s3fs (pip install -e '.[s3]')
    gs://BUCKET/KEY       the same through gcsfs (pip install -e '.[gs]')
    https://HOST/PATH     one file of a web server, with the standard library; http:// only for this machine
    hf://ORG/NAME         a dataset of the Hugging Face Hub: hub.py

Credentials come from where the client libraries look for them: environment, their own files, the machine's role. An
address that holds some (`https://user:password@…`) is refused. A signed one stands in plans as it was given, since it
is needed to read; messages, row ids and lineage show an address without its query string.

What tells a file from its later self (`SourceFile.version`): the ETag of S3, the generation of Google Cloud Storage,
on the web the ETag, else Last-Modified; a server that sends neither says nothing of a file that changes without
changing its length. All of them are compared with every range that is read.
"""

from __future__ import annotations

from typing import BinaryIO

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.sources.files import SourceFile, shown
from nemotron.data_prep.sources.ranges import StoredObject, range_stream
from nemotron.data_prep.sources.stores import CREDENTIALS, find_in_store, store_fetch

SCHEMES = ("s3", "gs", "https", "http", "hf")


def is_remote(location: str) -> bool:
    """Whether a location is an address rather than a path of this machine. UserError: of an unknown kind."""
    scheme, separator, _ = location.partition("://")
    if not separator:
        return False
    if scheme not in SCHEMES:
        near = nearest(scheme, SCHEMES)
        raise UserError(
            f"{shown(location)}: cannot read from {scheme}://",
            f"did you mean {near}://?" if near else f"known: {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    return True


def find_objects(location: str) -> list[StoredObject]:
    """What an address stands for, in the order of the names: one file, those that a glob matches, or all in a folder.

    UserError, in one line: nothing there, access denied, no credentials, no such host, a missing client library.
    """
    scheme, _, rest = location.partition("://")
    if scheme == "hf":
        from nemotron.data_prep.sources.hub import find_hub_objects

        return find_hub_objects(location)
    if "@" in rest.split("/", 1)[0]:
        raise UserError(f"{shown(location)}: credentials have no place in an address", CREDENTIALS.get(scheme))
    if scheme in ("https", "http"):
        from nemotron.data_prep.sources.web import find_on_web

        return [find_on_web(location)]
    return find_in_store(location)


def open_remote(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a remote file's stored bytes, fetched in ranges.

    `end`: the byte before which the reader will probably stop; no more than that is read ahead.
    RunFailed: the file changed since it was listed, or cannot be read (any more).
    """
    if file.uri.startswith("hf://"):
        from nemotron.data_prep.sources.hub import open_hub_file

        return open_hub_file(file, end)
    if file.uri.startswith(("https://", "http://")):
        from nemotron.data_prep.sources.web import web_fetch

        return range_stream(file, web_fetch(file), end)
    return range_stream(file, store_fetch(file), end)
