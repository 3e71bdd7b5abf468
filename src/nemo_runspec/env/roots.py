"""Where runs, artifacts and the mirrors of remote registries live, as this process sees it.

The root of a registry is a path, or the URL of an object store (`s3://bucket/prefix`, `gs://…`, whatever fsspec knows).
Credentials never stand in such a URL, since it is printed and recorded; a client library finds them in the environment
or in files of its own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from nemo_runspec.env.file import load_tables
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import expanded
from nemo_runspec.variables import ARTIFACTS_ROOT, OUTPUT_ROOT

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_SCHEMES = ("file", "local")


def output_root() -> Path:
    """Where runs live: RUNSPEC_OUTPUT_ROOT, else ./output."""
    return expanded(os.environ.get(OUTPUT_ROOT) or "output", f"{OUTPUT_ROOT}=").absolute()


def artifacts_root() -> Path | str:
    """Where the artifact registry lies: RUNSPEC_ARTIFACTS_ROOT, else [artifacts] root, else ./output/artifacts.

    An absolute path; text where it is a URL (`s3://bucket/artifacts`).
    """
    root = os.environ.get(ARTIFACTS_ROOT)
    if root:  # inside a job: env.toml has been read already
        return located_root(root, None)
    file, toml = load_tables()
    root = toml.data.get("artifacts", {}).get("root")
    return output_root() / "artifacts" if root is None else located_root(root, file)


def cache_folder() -> Path:
    """Where the mirrors of registries lie: in [cache] dir of env.toml, else in XDG_CACHE_HOME, else in ~/.cache."""
    file, toml = load_tables()
    folder = toml.data.get("cache", {}).get("dir")
    if folder is not None and file is not None:
        base = file.absolute().parent / expanded(folder, f"{file}: ")
    else:
        base = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.absolute() / "runspec" / "artifacts"


def located_path(file: Path | None, text: str, named: str = "") -> Path:
    """A path of env.toml: `~` and paths relative to the file are allowed. `named`: what names it where no file does."""
    base = Path.cwd() if file is None else file.absolute().parent
    return Path(os.path.normpath(base / expanded(text, f"{file}: " if file else named)))


def located_root(text: str, file: Path | None) -> Path | str:
    """The root of a registry as env.toml writes it, or, without a file, RUNSPEC_ARTIFACTS_ROOT: a URL as `parse_root`
    reads it, a path made absolute."""
    return parse_root(text) if "://" in text else located_path(file, text, f"{ARTIFACTS_ROOT}=")


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
        return expanded(root).absolute()
    match = _URL.fullmatch(root.strip())
    # Taken for a path, a URL would become a folder of that name, with the password that may stand in it.
    if "::" in root or "://" in (match[2] if match else root):
        raise UserError(
            f"registry root {root.strip().partition(':')[0]}:***: not the URL of a folder",
            "write s3://bucket/folder, or a path; no chain of URLs (simplecache::s3://…), no :: or :// in a name",
        )
    if match is None:
        return expanded(root).absolute()
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
