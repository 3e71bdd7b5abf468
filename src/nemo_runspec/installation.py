"""How to install what is missing: one line, right for a clone and for a wheel, with the versions tested together."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nemo_runspec.errors import UserError
from nemo_runspec.runspec import Runspec
from nemo_runspec.variables import CODE_DIGEST

# `src` of a clone, `site-packages` where a wheel was installed.
_PACKAGES = Path(__file__).resolve().parents[1]
# NeMo-Run needs older versions of a few libraries than the other extras are tested with.
_CLUSTER_EXTRAS = ("launch", "ray", "s3", "gs")
# What scripts import at their top or list as dependencies, and the extra that brings it.
_BROUGHT_BY = {
    "torch": "train",
    "lm_eval": "eval",
    **dict.fromkeys(("warcio", "trafilatura", "py3langid", "scikit-learn", "openai"), "curation"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client", "llguidance"), "serve"),
}


class StoreClient(NamedTuple):
    """The module that speaks to a registry behind a URL, and the extra that brings it."""

    extra: str
    module: str


_S3, _GS = StoreClient("s3", "s3fs"), StoreClient("gs", "gcsfs")
# By the scheme of the URL.
STORE_CLIENTS = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "wandb": StoreClient("wandb", "wandb")}


class Distribution(NamedTuple):
    """What brought this package: its name, the clone (None for a wheel), and its files of constraints."""

    name: str
    clone: Path | None
    constraints: dict[str, Path]


def own_distribution() -> Distribution | None:
    """The distribution that this package is part of; None where it lies alone, as in the bundle of a job."""
    return _distribution_of(_PACKAGES)


@functools.cache
def _distribution_of(packages: Path) -> Distribution | None:
    pyproject = packages.parent / "pyproject.toml"
    if packages.name == "src" and pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        if "name" in project:
            constraints = {path.name: path for path in packages.glob("*/constraints*.txt")}
            return Distribution(project["name"], packages.parent, constraints)
    for wheel in importlib.metadata.distributions(path=[str(packages)]):
        if f"{__package__}/__init__.py" in (wheel.read_text("RECORD") or ""):
            files = [Path(str(wheel.locate_file(file))) for file in wheel.files or () if len(file.parts) == 2]
            return Distribution(wheel.name, None, {file.name: file for file in files})
    return None


def install_line(extra: str) -> str:
    """The `pip install` that brings `extra` of this distribution; in the folder of a clone its paths are relative.

    A clone is installed as an editable package; of an installed wheel pip adds the extra's packages and asks no index
    for the wheel again.
    """
    own = own_distribution()
    if own is None:
        return f"the Python that runs this needs what the extra `{extra}` brings"
    constraints = own.constraints.get(f"constraints{'-cluster' if extra in _CLUSTER_EXTRAS else ''}.txt")
    if own.clone is None:
        words = [f"{own.name}[{extra}]"]
    else:
        # In a job the code lies in a folder that goes: the line is for a clone, in the environment of the job.
        here = own.clone == Path.cwd() or CODE_DIGEST in os.environ
        if constraints is not None and here:
            constraints = constraints.relative_to(own.clone)
        words = ["-e", f"{Path() if here else own.clone}[{extra}]"]
    return shlex.join(["pip", "install", *(["-c", str(constraints)] if constraints else []), *words])


def imported_from_extras(script: Path) -> list[str]:
    """The modules of extras that a script imports at its top. UserError: it is no Python."""
    names: set[str] = set()
    try:
        statements = ast.parse(script.read_bytes()).body
    except SyntaxError as error:
        raise UserError(f"{script}:{error.lineno}: {error.msg}") from None
    for node in statements:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        names |= {module.partition(".")[0] for module in modules} & _BROUGHT_BY.keys()
    return sorted(names)


def check_dependencies(spec: Runspec, image: str | None = None, others: Callable[[], list[str]] = list) -> None:
    """Refuse a script that lists a distribution under `dependencies` that is not installed here.

    The hint names the image that has it, and configs for other scripts.

    Args:
        image: that of the config, which goes before the script's.
        others: names these configs; called where something is missing.

    Raises:
        UserError: naming the script, the distribution and what installs it.
    """
    for name in spec.dependencies:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            own = own_distribution()
            if own is not None and name == own.name:
                continue  # this very code, which need not be installed to run
            error = _not_installed(spec.script_path, name)
            if image := image or spec.image:
                configs = ", ".join(others())
                error.hint = f"the image {image} has it: --run PROFILE"
                error.hint += f"; or another config, -c {configs}" if configs else ""
            raise error from None


def check_imports(script: Path) -> None:
    """Refuse a script that imports at its top what only an extra brings, if that is not installed here.

    Raises:
        UserError: naming the script, the library and the line that installs it.
    """
    for name in imported_from_extras(script):
        if importlib.util.find_spec(name) is None:
            raise _not_installed(script, name)


def without_library(error: ModuleNotFoundError, script: Path) -> UserError | None:
    """What a script says that failed to import what an extra brings; None where no extra brings it, which is a bug."""
    name = (error.name or "").partition(".")[0]
    return _not_installed(script, name) if name in _BROUGHT_BY else None


def _not_installed(script: Path, name: str) -> UserError:
    extra = _BROUGHT_BY.get(name)
    hint = install_line(extra) if extra else f"pip install {name}"
    return UserError(f"{script.name} needs {name}, which is not installed", hint)
