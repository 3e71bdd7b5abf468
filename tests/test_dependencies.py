"""Dependencies arrive with the code that imports them: the core list of pyproject.toml is what `src` imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {"pyyaml": "yaml", "mlflow-skinny": "mlflow", "scikit-learn": "sklearn"}


def modules(requirements: list[str]) -> set[str]:
    """What is imported of each requirement: its name, but for IMPORTED_AS."""
    names = [re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def imported(folder: Path) -> set[str]:
    """Top-level modules that the files under `folder` import anywhere, without the standard library and our own."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"nemotron", "nemo_runspec"}


def test_the_core_dependencies_are_what_the_source_imports() -> None:
    core = modules(PROJECT["dependencies"])
    extras = modules([item for group in PROJECT["optional-dependencies"].values() for item in group])
    used = imported(ROOT / "src")
    assert core - used == set(), "declared, and imported nowhere"
    assert used - core - extras == set(), "imported, and declared nowhere"


def test_every_core_dependency_has_one_tested_version() -> None:
    pinned = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    assert modules(PROJECT["dependencies"]) - {name.lower() for name in modules(pinned)} - {"yaml"} == set()
