"""Files on object stores and web servers: listed, and read in ranges of bytes without a copy on this machine.

    s3://BUCKET/KEY       a file, a glob (`*`, `**`, `?`, `[ab]`) or a folder, through s3fs (pip install -e '.[s3]')
    gs://BUCKET/KEY       the same through gcsfs (pip install -e '.[gs]')
    https://HOST/PATH     one file of a web server, with the standard library; http:// only for this machine
    hf://ORG/NAME         a dataset of the Hugging Face Hub: hub.py

Credentials come from where the client libraries look for them: environment, their own files, the machine's role. An
address with credentials in it (`https://user:password@…`) is refused. A signed address is kept whole in plans, since
reading needs it; messages, row ids and lineage show it without its query string.

A file that changes is noticed by its version, which is compared with every range that is read: the ETag of S3, the
generation of Google Cloud Storage, on the web the ETag or else Last-Modified. Where a web server sends neither, only a
change of length is noticed.
"""

from __future__ import annotations

from typing import BinaryIO

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.sources.files import SourceFile, redact
from nemotron.data_prep.sources.ranges import StoredObject, range_stream
from nemotron.data_prep.sources.stores import CREDENTIALS, find_in_store, store_fetch

SCHEMES = ("s3", "gs", "https", "http", "hf")


def find_objects(location: str) -> list[StoredObject]:
    """What an address stands for, sorted by name: one file, the files that a glob matches, or all files of a folder.

    UserError, in one line: an unknown kind of address, nothing is there, access is denied, there are no credentials, no
    such host or no client library.
    """
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES:
        near = nearest(scheme, SCHEMES)
        raise UserError(
            f"{redact(location)}: cannot read from {scheme}://",
            f"did you mean {near}://?" if near else f"known: {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    if scheme == "hf":
        from nemotron.data_prep.sources.hub import find_hub_objects

        return find_hub_objects(location)
    if "@" in rest.split("/", 1)[0]:
        raise UserError(f"{redact(location)}: credentials have no place in an address", CREDENTIALS.get(scheme))
    if scheme in ("https", "http"):
        from nemotron.data_prep.sources.web import find_on_web

        return [find_on_web(location)]
    return find_in_store(location)


def open_remote(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a remote file's stored bytes, fetched in ranges.

    `end`: the byte before which the reader will probably stop; no more than that is read ahead.
    RunFailed: the file has changed since it was listed, or cannot be read.
    """
    if file.uri.startswith("hf://"):
        from nemotron.data_prep.sources.hub import open_hub_file

        return open_hub_file(file, end)
    if file.uri.startswith(("https://", "http://")):
        from nemotron.data_prep.sources.web import web_fetch

        return range_stream(file, web_fetch(file), end)
    return range_stream(file, store_fetch(file), end)
