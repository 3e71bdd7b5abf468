"""The code of a project behind a script: the modules that it imports, however deep, found by reading, not by running.

A module counts if it lies where the script's place in its project says that the project's code is: beside the script,
in the folder that the script's package is in, in `src` or beside `pyproject.toml` of the project around it. What is
installed does not count, nor the standard library, nor this toolkit, which decides nothing about what a script
computes. So the same code gives the same digests on a laptop and in a job.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.user_files import expanded

_INSTALLED = ("site-packages", "dist-packages")
_DATA = (".jinja", ".json", ".jsonl", ".csv")
_FUNCTION = re.compile(r"(?:(?P<file>.+\.py)|(?P<module>[A-Za-z_]\w*(?:\.\w+)*)):[A-Za-z_]\w*")


def code_of(script: Path, config: Any = None, schema: Path | None = None) -> dict[str, str]:
    """The sha256 of every module of the project that the script needs, by the module's name; not of the script itself.

    Args:
        config: plain values. A text in it that names a function (`package.module:function` of the project,
            `file.py:function`) brings that module, too; a file goes by that text, and what it imports may lie
            beside it.
        schema: the file of the script's schema.

    An import counts wherever it stands: inside a function, under `TYPE_CHECKING`. A module that is imported by a name
    made at run time does not. Of a package, templates and tables beside its `__init__.py` count, too.
    """
    roots = _Roots(script)
    code: dict[str, str] = {}
    pending = [*_read(script, "")[1]]
    if schema is not None:
        code[schema.name], names = _read(schema, "")
        pending += names
    functions = sorted(set(_functions(config)), key=str)
    for text, file in functions:
        if file is not None:
            code[text], names = _read(file, "")
            pending += names
            roots.beside.append(file.parent)
    pending += [module for module, file in functions if file is None]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            pending.append(name.rpartition(".")[0])  # importing a.b runs a/__init__.py
        for number, path in enumerate(path for path in roots.find(name) if path != script):
            key = f"{name}#{number}" if number else name
            code[key], names = _read(path, name)
            pending += names
            if path.name == "__init__.py":
                data = (file for file in path.parent.iterdir() if file.suffix in _DATA)
                code |= {f"{key}/{file.name}": sha256_file(file) for file in data}
    return dict(sorted(code.items()))


def module_file(script: Path, name: str) -> Path | None:
    """The file of a module of the project that `script` is in; None for one that is not the project's."""
    return next(iter(_Roots(script).find(name)), None)


class _Roots:
    """The folders in which modules of the project of a script are looked up, in order."""

    def __init__(self, script: Path) -> None:
        package = script.parent
        while (package / "__init__.py").is_file():
            package = package.parent
        self.only: str | None = None
        self.folders = [script.parent, package]
        self.beside: list[Path] = []  # of the functions that a config names by their files
        if package.name in _INSTALLED:  # what lies beside the script's own package is other people's
            self.only = script.relative_to(package).parts[0]
        else:
            above = (package, *package.parents)
            project = next((folder for folder in above if (folder / "pyproject.toml").is_file()), None)
            self.folders += [project / "src", project] if project else []

    def find(self, name: str) -> list[Path]:
        """The file of a module, none for one that is not the project's; beside functions of several files may lie
        several of one name, which all count, as each may be the one that runs."""
        top, path = name.partition(".")[0], name.replace(".", "/")
        if top == __package__:
            return []
        for folder in self.folders:
            if self.only not in (None, top) and folder.name in _INSTALLED:
                continue
            for file in _places(folder, path):
                if file.is_file():
                    return [file]
        files = (next(filter(Path.is_file, _places(folder, path)), None) for folder in dict.fromkeys(self.beside))
        return [file for file in files if file is not None]


def _places(folder: Path, path: str) -> tuple[Path, Path]:
    """Where Python looks for a module below a folder, in order."""
    return folder / path / "__init__.py", folder / f"{path}.py"


def _read(path: Path, module: str) -> tuple[str, tuple[str, ...]]:
    """The sha256 of a module's file, and the names that may be modules which it imports."""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), _imported(content, module, path.name == "__init__.py")


@functools.lru_cache(maxsize=1024)  # the steps of a pipeline share most of their modules
def _imported(content: bytes, module: str, is_package: bool) -> tuple[str, ...]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return ()  # Python itself will say so, with the line
    names: list[str] = []
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in _import_statements(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
            continue
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        names += (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
    return tuple(names)


def _import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those below a node: statements alone are entered, which is a fifth of the time of walking all nodes."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for below in getattr(node, field, ()):
            if isinstance(below, ast.Import | ast.ImportFrom):
                yield below
            else:
                yield from _import_statements(below)


def _functions(config: Any) -> Iterable[tuple[str, Path | None]]:
    """Each function that a text of a config may name: its module and None, or the text and its file."""
    if isinstance(config, Mapping):
        for value in config.values():
            yield from _functions(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _functions(value)
    elif isinstance(config, str) and (match := _FUNCTION.fullmatch(config)):
        if match["module"]:
            yield match["module"], None
        elif (file := expanded(match["file"])).is_file():
            yield config, file.absolute()
