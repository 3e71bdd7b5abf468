"""A stand-in for the W&B client, as far as a registry of artifacts calls it: its server is a folder.

It keeps what the registry relies on: a version is there when its run has ended, versions are counted from v0 for each
name, content that a version of the name has already makes no new one, and a file that is downloaded may be another one
than was uploaded (`damage`).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import shutil
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_LOCK = threading.Lock()


class CommError(Exception):
    """What the client raises where the server refuses."""


class Entry:
    def __init__(self, file: Path, path: str) -> None:
        self.file, self.path, self.size = file, path, file.stat().st_size

    def download(self, root: str | None = None, skip_cache: bool | None = None) -> str:
        target = Path(str(root)) / self.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.file, target)
        return str(target)


class Logged:
    """An artifact that the server has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, folder.name

    @property
    def manifest(self) -> SimpleNamespace:
        files = {p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()}
        return SimpleNamespace(entries={path: Entry(file, path) for path, file in files.items()})

    def get_entry(self, name: str) -> Entry:
        return self.manifest.entries[name]

    def delete(self, delete_aliases: bool = False) -> None:
        assert delete_aliases, "the latest version has an alias"
        self.folder.rename(self.folder.with_name(f"deleted-{self.folder.name}"))


def client(server: Path) -> ModuleType:
    """The module `wandb`, logged in to the server whose state is the folder `server`."""

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            self.name, self.type = name, type
            self.files: dict[str, Path] = {}
            self.version: str | None = None

        def add_dir(self, local_path: str, policy: str = "mutable", skip_cache: bool = False) -> None:
            files = [file for file in Path(local_path).rglob("*") if file.is_file()]
            self.files |= {file.relative_to(local_path).as_posix(): file for file in files}

        def add_file(self, local_path: str, name: str) -> None:
            self.files[name] = Path(local_path)

        def wait(self) -> Artifact:
            return self

    class Run:
        def __init__(self, entity: str, project: str, mode: str, **others: Any) -> None:
            assert mode == "online" and others["reinit"] == "create_new"
            self.folder = server / entity / project

        def __enter__(self) -> Run:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def log_artifact(self, artifact_or_path: Artifact) -> Artifact:
            artifact = artifact_or_path
            content = {path: hashlib.md5(file.read_bytes()).hexdigest() for path, file in artifact.files.items()}
            digest = hashlib.md5(json.dumps(content, sort_keys=True).encode()).hexdigest()
            home = self.folder / artifact.type / artifact.name
            with _LOCK:
                home.mkdir(parents=True, exist_ok=True)
                known = json.loads((home / "digests").read_text()) if (home / "digests").exists() else []
                if digest in known:
                    artifact.version = f"v{known.index(digest)}"
                    return artifact
                artifact.version = f"v{len(known)}"
                (home / "digests").write_text(json.dumps([*known, digest]))
                for path, file in artifact.files.items():
                    target = home / artifact.version / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)
            return artifact

    class Api:
        viewer = SimpleNamespace(entity="me")

        def _at(self, name: str, type: str) -> Path:
            place, _, short = name.rpartition("/")
            return server / place / type / short.replace(":", "/")

        def artifact_exists(self, name: str, type: str) -> bool:
            return self._at(name, type).is_dir()

        def artifact_collection_exists(self, name: str, type: str) -> bool:
            return self._at(name, type).is_dir()

        def artifact(self, name: str, type: str) -> Logged:
            if not self.artifact_exists(name, type):
                raise CommError(f"artifact {name} not found")
            return Logged(self._at(name, type))

        def artifacts(self, type_name: str, name: str) -> list[Logged]:
            return [Logged(folder) for folder in self._at(name, type_name).glob("v*")]

        def artifact_collections(self, project_name: str, type_name: str) -> list[SimpleNamespace]:
            folder = server / project_name / type_name
            if not folder.is_dir():
                raise ValueError("Could not find artifact type")
            return [SimpleNamespace(name=entry.name) for entry in folder.iterdir()]

    module = ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.__dict__.update(Artifact=Artifact, Api=Api, init=Run, Settings=SimpleNamespace)
    return module
