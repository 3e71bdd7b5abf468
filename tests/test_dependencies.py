"""Dependencies arrive with the code that imports them: the core list of pyproject.toml is what `src` imports.

Of the extras, `train` is what scripts that train import besides; nothing is declared that nobody uses.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_runspec.runspec import parse

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMPORTED_AS = {
    "pyyaml": "yaml", "mlflow-skinny": "mlflow", "scikit-learn": "sklearn", "megatron-core": "megatron",
    "nvidia-modelopt": "modelopt",
}  # fmt: skip
# Not imported by name: programs, plug-ins (of fsspec, pytest and trafilatura), and what another one was found to need.
PROGRAMS = {"pytest_timeout", "pytest_xdist", "ruff", "mypy", "import_linter", "types_PyYAML", "types_jsonschema"}
PLUG_INS = {"mkdocs_material", "mkdocstrings", "s3fs", "gcsfs", "lxml_html_clean", "leptonai"}
BY_NAME = {"nemo_run", "mlflow", "wandb", "datasets", "hatchling", "accelerate"}  # not by an import statement


def names(requirements: list[str]) -> list[str]:
    """The names of requirements, without extras and versions."""
    return [re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements]


def modules(requirements: list[str]) -> set[str]:
    """What is imported of each requirement: its name, but for IMPORTED_AS; our own extras left out."""
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names(requirements) if name != PROJECT["name"]}


@cache
def imported(folder: Path) -> frozenset[str]:
    """Top-level modules that the files under `folder` import anywhere, without the standard library and our own."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return frozenset(found - set(sys.stdlib_module_names) - {"nemotron", "nemo_runspec"})


def test_the_core_dependencies_are_what_the_source_imports() -> None:
    core = modules(PROJECT["dependencies"])
    extras = modules([item for group in EXTRAS.values() for item in group])
    used = imported(ROOT / "src")
    assert core - used == set(), "declared, and imported nowhere"
    # What only an image has, a script's own block declares.
    scripts = [path for path in (ROOT / "src").rglob("*.py") if "\n# [tool.runspec]" in path.read_text()]
    images = modules([name for path in scripts for name in parse(path).dependencies])
    assert used - core - extras - images == set(), "imported, and declared nowhere"


@pytest.mark.parametrize("extra", EXTRAS)
def test_nothing_in_an_extra_is_unused(extra: str) -> None:
    used = set().union(*(imported(ROOT / folder) for folder in ("src", "tests", "benchmarks", "docs")))
    assert modules(EXTRAS[extra]) - used - PROGRAMS - PLUG_INS - BY_NAME == set()


def test_torch_is_in_the_extra_train_alone() -> None:
    assert modules(EXTRAS["train"]) == {"torch"}
    assert "torch" not in modules(PROJECT["dependencies"])
    imports = grimp.build_graph("nemotron", include_external_packages=True, cache_dir=None)
    for script in (ROOT / "src/nemotron/recipes").rglob("*.py"):
        text = script.read_text(encoding="utf-8")
        setup = re.search(r'^# setup = "nemotron-cookbook(\[\w+\])?"$', text, re.MULTILINE)
        assert ("# [tool.runspec]" in text) == (setup is not None), script
        if setup is not None:
            module = ".".join(script.relative_to(ROOT / "src").with_suffix("").parts)
            chain = imports.find_shortest_chain(importer=module, imported="torch")
            assert (setup[1] == "[train]") == (chain is not None), (script, chain)
            assert setup[1] is None or setup[1].strip("[]") in EXTRAS, script


TESTED = ("train", "curation", "hf", "eval", "serve", "docs", "dev")


@pytest.mark.parametrize(
    ("file", "extras"),
    [
        ("constraints.txt", (*TESTED, "wandb", "mlflow", "trackio", "tensorboard")),
        ("constraints-cluster.txt", (*TESTED, "launch", "ray", "s3", "gs", "cluster")),
    ],
)
def test_every_dependency_has_one_tested_version(file: str, extras: tuple[str, ...]) -> None:
    lines = (ROOT / "src/nemotron" / file).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    pinned = {canonicalize_name(name): version for name, version in pins}
    assert len(pinned) == len(pins)
    wanted = [*PROJECT["dependencies"], *(item for extra in extras for item in EXTRAS[extra])]
    requirements = [Requirement(item) for item in wanted if not item.startswith(PROJECT["name"])]
    assert {canonicalize_name(each.name) for each in requirements} - set(pinned) == set()
    # A bound that leaves out the tested version: pip would say only that the two do not go together.
    assert [str(each) for each in requirements if pinned[canonicalize_name(each.name)] not in each.specifier] == []
