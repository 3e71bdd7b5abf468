"""What the name of data means that a user gives to a tool: a path, an address, or an artifact."""

from __future__ import annotations

import re
from pathlib import Path

from nemo_runspec.artifacts.manifest import PAYLOAD_DIR, RECORD_FILE
from nemo_runspec.artifacts.naming import SCHEME
from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.errors import UserError, nearest
from nemo_runspec.user_files import expanded
from nemotron.kit.commands import command_for


def find(name: str) -> tuple[str, Version | None]:
    """The location that `name` means, and the artifact that it is.

    Raises:
        UserError: no such path and no such artifact; the nearest of both.
    """
    path = expanded(name)
    if path.exists() or Path(f"{path}.idx").is_file() or any(mark in name for mark in "*?["):
        return str(path), published_at(path.absolute())
    if path.is_symlink():
        raise UserError(f"{path} is a link to {path.readlink()}, and nothing is there")
    if (version := artifact_called(name)) is not None:
        return str(version.path), version
    if "://" in name:
        return name, None
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    near = str(path.parent / near) if near else nearest(name, Registry.default().names())
    raise UserError(f"no file, folder or artifact '{name}'", f"did you mean {near}?" if near else None)


def artifact_called(name: str) -> Version | None:
    """The artifact of that name, its files fetched; None where the name is not one's.

    UserError: the name has the form of one of the commands' artifacts, and there is no such artifact.
    """
    if "://" in name and not name.startswith(SCHEME):
        return None
    registry = Registry.default()
    artifact = re.split("[:@]", name.removeprefix(SCHEME))[0]
    if name.startswith(SCHEME) or artifact in registry.names() or ("/" not in name and command_for(artifact)):
        version = registry.resolve(name)
        version.fetch()
        return version
    return None


def published_at(path: Path) -> Version | None:
    """The artifact whose version or payload `path` is; None where it is something else."""
    folder = path.parent if path.name == PAYLOAD_DIR else path
    if not (folder / RECORD_FILE).is_file() or not folder.name.isdigit():
        return None
    return Registry(folder.parents[1]).resolve(f"{folder.parent.name}:{folder.name}")


def tokenizer_beside(path: Path) -> Path | None:
    """The folder `tokenizer` that lies beside data or in the folders above it; None where there is none."""
    folders = (folder / "tokenizer" for folder in (path, *path.absolute().parents[:2]))
    return next((folder for folder in folders if (folder / "tokenizer.json").is_file()), None)
