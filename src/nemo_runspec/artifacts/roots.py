"""What names a registry: a path, or the URL of an object store (`s3://bucket/prefix`, `gs://…`, whatever fsspec knows).

Credentials never stand in such a URL, since it is printed and recorded; a client library finds them in the environment
or in files of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from nemo_runspec.errors import UserError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")


def is_url(root: Path | str) -> bool:
    """Whether `root` names an object store; a path, and a URL of this machine (`file:///data`), does not.

    What `parse_root` refuses counts as one.
    """
    if isinstance(root, Path) or "://" not in root:
        return False
    match = _URL.match(root.strip())
    return match is None or match[1].lower() not in _LOCAL_SCHEMES


def parse_root(root: Path | str) -> Path | str:
    """The root as it is used and shown: an absolute path, or a URL without a slash at its end.

    Raises:
        UserError: a URL with a password, a query, a fragment or a chain of file systems in it. A password is not shown.
    """
    if isinstance(root, Path):
        return root.expanduser().absolute()
    match = _URL.fullmatch(root.strip())
    # Taken for a path, a URL would become a folder of that name, with the password that may stand in it.
    if "::" in root or "://" in (match[2] if match else root):
        raise UserError(
            f"registry root {root.strip().partition(':')[0]}:***: not the URL of a folder",
            "write s3://bucket/folder, or a path; no chain of URLs (simplecache::s3://…), no :: or :// in a name",
        )
    if match is None:
        return Path(root).expanduser().absolute()
    scheme, rest = match[1].lower(), match[2]
    if scheme in _LOCAL_SCHEMES:
        return Path("/" + rest.lstrip("/"))
    # Not urlsplit: an AWS secret may have a slash in it, behind which an @ would no longer belong to the host.
    if "@" in rest and ":" in rest.split("@")[0]:
        raise UserError(
            f"registry root {scheme}://***@{rest.rsplit('@', 1)[1]}: a URL with a password is refused",
            "it would be printed and recorded; give credentials through the environment",
        )
    if any(mark in rest for mark in ("?", "#")) or not rest.strip("/"):
        raise UserError(
            f"registry root {scheme}://{rest.split('?')[0]}: not the URL of a folder", "write s3://bucket/folder"
        )
    return f"{scheme}://{rest.rstrip('/')}"
