"""Versions as W&B artifacts: `wandb://ENTITY/PROJECT`.

A version is a W&B artifact of type `runspec` that holds what a version on an object store holds: payload, the run's
files, record and manifest with the sha256 of every file. W&B counts versions from v0, one for each that is logged, and
commits one whole or not at all: number N here is v(N-1) there. W&B's own checksums are not relied upon.

On this machine there is a mirror, as for an object store.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from fsspec import AbstractFileSystem

from nemo_runspec.artifacts.aside import aside_directory
from nemo_runspec.artifacts.build import Draft, build_version
from nemo_runspec.artifacts.fsspec_store import FsspecStore, publisher_line
from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line

TYPE = "runspec"
_MODULE = "wandb"


class WandbStore(FsspecStore):
    """The artifacts of a W&B project, and their mirror on this machine."""

    def __init__(self, root: str, cache: Path) -> None:
        """Raises UserError where the root is no `wandb://ENTITY/PROJECT`, or wandb is not installed."""
        entity, _, project = root.partition("://")[2].partition("/")
        if not entity or not project or "/" in project:
            raise UserError(f"{root}: not the address of a W&B project", "write wandb://ENTITY/PROJECT")
        if importlib.util.find_spec(_MODULE) is None:
            raise UserError(f"{root}: needs wandb, which is not installed", install_line("wandb"))
        self.entity, self.project = entity, project
        super().__init__(root, cache, (_WandbFiles(entity, project), ""))

    def check_writable(self, names: Iterable[str] = ()) -> None:
        """Log in; RunFailed where W&B refuses."""
        with self._answering():
            self.fs.log_in()

    def publish(self, name: str, draft: Draft) -> int:
        """Publish a version; its number. The mirror has it then, too."""
        with aside_directory(self.local_root) as directory, aside_directory(self.local_root) as scratch:
            build_version(directory, name, draft)
            with self._answering():
                number = self._log(directory, name, scratch)
            self._keep(directory, name, number)
        return number

    def remove(self, name: str, number: int) -> None:
        """Remove a version."""
        with self._answering():
            self.fs.artifact(name, number).delete(delete_aliases=True)
            self.fs.artifact.cache_clear()
        shutil.rmtree(self.local_root / name / str(number), ignore_errors=True)

    def _log(self, directory: Path, name: str, scratch: Path) -> int:
        wandb = importlib.import_module(_MODULE)
        artifact = wandb.Artifact(name, type=TYPE)
        artifact.add_dir(str(directory), policy="immutable", skip_cache=True)
        # W&B takes an artifact with the content of another one for that one.
        (scratch / "publisher").write_text(publisher_line(), encoding="utf-8")
        artifact.add_file(str(scratch / "publisher"), name=".publisher")
        # A run of its own: the script that publishes may have one open for its metrics.
        settings = wandb.Settings(silent=True, console="off")
        with wandb.init(
            entity=self.entity,
            project=self.project,
            job_type="publish",
            dir=str(scratch),
            mode="online",
            reinit="create_new",
            settings=settings,
        ) as run:
            logged = run.log_artifact(artifact).wait()
        return int(str(logged.version).removeprefix("v")) + 1


class _WandbFiles(AbstractFileSystem):
    """The files of a project's artifacts, as `/NAME/NUMBER/FILE`; to be read only."""

    cachable = False

    def __init__(self, entity: str, project: str) -> None:
        super().__init__(use_listings_cache=False)
        self.place = f"{entity}/{project}"
        self.artifact = functools.cache(self._artifact)  # a version does not change

    @functools.cached_property
    def api(self) -> Any:
        return importlib.import_module(_MODULE).Api()

    def log_in(self) -> None:
        """Ask W&B who this is."""
        _ = self.api.viewer

    def _artifact(self, name: str, number: int) -> Any:
        path = f"{self.place}/{name}:v{number - 1}"
        if not self.api.artifact_exists(path, TYPE):
            raise FileNotFoundError(2, "no such version", path)
        return self.api.artifact(path, TYPE)

    def _parts(self, path: str) -> tuple[Any, str]:
        name, number, file = path.strip("/").split("/", 2)
        return self.artifact(name, int(number)), file

    def _entry(self, path: str) -> Any:
        artifact, file = self._parts(path)
        try:
            return artifact.get_entry(file)
        except KeyError:
            raise FileNotFoundError(2, "no such file", path) from None

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Names of the project, numbers of a name; deeper nothing is listed."""
        name = path.strip("/")
        entries: list[str] = []
        if not name:
            try:
                entries = [each.name for each in self.api.artifact_collections(self.place, TYPE)]
            except ValueError:  # no artifact of this type yet, or no project
                entries = []
        elif self.api.artifact_collection_exists(f"{self.place}/{name}", TYPE):
            versions = self.api.artifacts(TYPE, f"{self.place}/{name}")
            entries = [str(int(each.version.removeprefix("v")) + 1) for each in versions]
        return [{"name": entry, "size": 0, "type": "directory"} if detail else entry for entry in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": self._entry(path).size, "type": "file"}

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **_: Any) -> dict[str, Any]:
        """With `detail=True`, which is all that is asked for."""
        artifact, inside = self._parts(path)
        folder = path.strip("/").removesuffix(inside)
        return {
            f"{folder}{file}": {"size": entry.size}
            for file, entry in artifact.manifest.entries.items()
            if file.startswith(f"{inside}/")
        }

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        with tempfile.TemporaryDirectory(dir=Path(lpath).parent) as folder:
            Path(self._entry(rpath).download(root=folder, skip_cache=True)).replace(lpath)

    def open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes]:
        with tempfile.TemporaryDirectory() as folder:  # the file lives until it is closed
            return Path(self._entry(path).download(root=folder, skip_cache=True)).open("rb")
