"""Where runs and artifacts live, as this process sees it."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_runspec.env.file import load_tables
from nemo_runspec.variables import ARTIFACTS_ROOT, OUTPUT_ROOT


def artifacts_root() -> Path | str:
    """Where the artifact registry lies: RUNSPEC_ARTIFACTS_ROOT, else [artifacts] root, else ./output/artifacts.

    An absolute path; text where it is a URL (`s3://bucket/artifacts`).
    """
    named = os.environ.get(ARTIFACTS_ROOT)
    if named:  # inside a job: env.toml has had its say
        return located_root(named, None)
    path, toml = load_tables()
    root = toml.data.get("artifacts", {}).get("root")
    return output_root() / "artifacts" if root is None else located_root(root, path)


def located_root(text: str, file: Path | None) -> Path | str:
    """The root of a registry: a URL as it is, a path made absolute."""
    if "://" not in text:
        return located_path(file, text)
    from nemo_runspec.artifacts.roots import parse_root

    return parse_root(text)


def output_root() -> Path:
    """Where runs live: RUNSPEC_OUTPUT_ROOT, else ./output."""
    return Path(os.environ.get(OUTPUT_ROOT) or "output").expanduser().absolute()


def located_path(file: Path | None, text: str) -> Path:
    """A path of env.toml: `~` and paths relative to the file are allowed."""
    base = Path.cwd() if file is None else file.absolute().parent
    return Path(os.path.normpath(base / Path(text).expanduser()))


def located_text(root: str, file: Path | None) -> str:
    return str(located_root(root, file))


def is_url(text: str) -> bool:
    """Whether `text` names a place that every machine can reach: `s3://…`, `gs://…`, not a folder."""
    if "://" not in text:
        return False
    from nemo_runspec.artifacts.roots import is_url

    return is_url(text)
