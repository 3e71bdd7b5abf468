"""Python sources of libraries that are not installed: which names a module has, which fields a dataclass, what is read.

    python tests/contracts/sources.py        # fetches what wheels.txt lists into .contracts/, once

The wheels want GPUs to be imported, so they are unpacked and read as syntax trees.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / ".contracts"
WHEELS = Path(__file__).with_name("wheels.txt")
PLATFORMS = ("any", "manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_39_x86_64")


def pins() -> dict[str, str]:
    """NAME==VERSION and the Python that the wheel is for."""
    lines = [line.split() for line in WHEELS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return dict(lines)


def fetch() -> None:
    """Unpack each wheel into a folder of its name and version, unless it is there."""
    for pin, python in pins().items():
        if (FOLDER / pin).is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
            command += [word for platform in PLATFORMS for word in ("--platform", platform)]
            subprocess.run([*command, "--dest", folder, pin], check=True)
            FOLDER.mkdir(exist_ok=True)
            unpacked = Path(tempfile.mkdtemp(dir=FOLDER))
            zipfile.ZipFile(next(Path(folder).iterdir())).extractall(unpacked)
            unpacked.rename(FOLDER / pin)


def unpacked(*names: str) -> list[Path]:
    """The folders of these distributions, at their pinned versions."""
    folders = {pin.partition("==")[0]: FOLDER / pin for pin in pins()}
    return [folders[name] for name in names]


@dataclass(frozen=True)
class Signature:
    """What a call takes: names, of which the first `positional` need not be said, and those without a default."""

    parameters: list[str]
    positional: int
    required: set[str]


def call_faults(call: ast.Call, signature: Signature) -> Iterator[str]:
    """Why a call would be refused: a name that is not taken, an argument too many or one missing.

    What `*rows` and `**groups` hold is not seen; beside them nothing is missing.
    """
    name, keywords = ast.unparse(call.func), {word.arg for word in call.keywords if word.arg}
    spread = any(isinstance(each, ast.Starred) for each in call.args) or any(not word.arg for word in call.keywords)
    given = signature.parameters[: len(call.args)]
    if len(call.args) > signature.positional or keywords & set(given) or not keywords <= set(signature.parameters):
        yield f"{name} does not take that: {ast.unparse(call)}"
    elif not spread and (missing := signature.required - {*given, *keywords}):
        yield f"{name} wants {', '.join(sorted(missing))}"


class Sources:
    """The modules of several distributions, as one tree of packages."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots

    def _file(self, module: str) -> Path:
        for root in self._roots:
            for file in (root / f"{module.replace('.', '/')}.py", root / module.replace(".", "/") / "__init__.py"):
                if file.is_file():
                    return file
        raise LookupError(f"no module {module}")

    @functools.cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        """The syntax of a module.

        Raises:
            LookupError: there is none of that name.
        """
        return parse_quietly(self._file(module))

    def _imports(self, module: str) -> dict[str, tuple[str, str]]:
        """Names that a module imports from others: (module, name there)."""
        package = module if self._file(module).name == "__init__.py" else module.rpartition(".")[0]
        found = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                home = ".".join([*above, *([node.module] if node.module else [])])
                found |= {alias.asname or alias.name: (home, alias.name) for alias in node.names}
        return found

    def definition(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
        """The class or function that a module calls `name`, and the module that defines it.

        Raises:
            LookupError: the module has no such name, or imports it from what is not here.
        """
        for node in self.tree(module).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
        imported = self._imports(module)
        if name in imported:
            return self.definition(*imported[name])
        for node in self.tree(module).body:  # `from .model_quant import *`
            if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["*"] and node.level == 1:
                with contextlib.suppress(LookupError):
                    return self.definition(f"{module}.{node.module}", name)
        raise LookupError(f"{module} has no {name}")

    def fields(self, module: str, name: str) -> dict[str, ast.expr]:
        """Annotated fields of a class and of its bases, as far as these are here: name -> annotation."""
        home, node = self.definition(module, name)
        assert isinstance(node, ast.ClassDef), f"{name} is no class"
        found: dict[str, ast.expr] = {}
        for base in node.bases:
            place = (home, base.id) if isinstance(base, ast.Name) else self._through_a_module(home, base)
            with contextlib.suppress(LookupError):  # of a library that is not looked at, as torch's
                found |= self.fields(*place)
        return found | {
            entry.target.id: entry.annotation
            for entry in node.body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }

    def _through_a_module(self, home: str, base: ast.expr) -> tuple[str, str]:
        """`plugin.Config` of `import a.plugin as plugin`: the module, and the name in it."""
        owner, _, name = ast.unparse(base).rpartition(".")
        for node in ast.walk(self.tree(home)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == owner:
                        return alias.name, name
        return owner, name

    def signature(self, module: str, name: str) -> Signature:
        """What a call of a function, or of a dataclass, takes; which fields have a default is not looked at."""
        _, node = self.definition(module, name)
        if isinstance(node, ast.ClassDef):
            fields = list(self.fields(module, name))
            return Signature(fields, len(fields), set())
        named, alone = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
        required = {argument.arg for argument in named[: len(named) - len(node.args.defaults)]}
        required |= {each.arg for each, default in zip(alone, node.args.kw_defaults, strict=True) if default is None}
        return Signature([argument.arg for argument in (*named, *alone)], len(named), required)

    @functools.cached_property
    def attributes_read(self) -> set[str]:
        """Every attribute that any module but a recipe reads, `getattr` with a literal name included."""
        return set(self._attributes_read())

    def _attributes_read(self) -> Iterator[str]:
        for root in self._roots:
            for file in root.rglob("*.py"):
                if "recipes" in str(file.relative_to(root)):
                    continue  # they set fields; whether anything listens is the question
                for node in ast.walk(parse_quietly(file)):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                        yield node.attr
                    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                        yield from (word.value for word in node.args[1:2] if isinstance(word, ast.Constant))


def parse_quietly(file: Path) -> ast.Module:
    """The syntax of a file; its warnings are its authors'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes())


def accepts(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of a config is of the type that an annotation names; a type that it does not know takes none."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return accepts(ast.parse(annotation.value, mode="eval").body, value)
    if isinstance(annotation, ast.BinOp):
        return accepts(annotation.left, value) or accepts(annotation.right, value)
    if isinstance(annotation, ast.Constant):
        return value is None and annotation.value is None
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value).rpartition(".")[2]
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if outer == "Literal":
            return value in [ast.literal_eval(choice) for choice in inner]
        if outer in ("Optional", "Union"):
            return (outer == "Optional" and value is None) or any(accepts(choice, value) for choice in inner)
        if outer in ("list", "List"):
            return isinstance(value, list) and all(accepts(inner[0], item) for item in value)
        return False
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    name = ast.unparse(annotation).rpartition(".")[2]
    return isinstance(value, types.get(name, ())) and (name == "bool" or not isinstance(value, bool))


@contextmanager
def imported(roots: list[Path], modules: list[str], stand_ins: dict[str, dict[str, Any]]) -> Iterator[list[ModuleType]]:
    """A few modules of libraries, really imported, without what their packages import beside them.

    Args:
        roots: folders of wheels. modules: what is imported, as it is there; a package that is none of them is empty.
        stand_ins: names of modules that these import and that are not wanted, and of each what it has.
    """
    packages: set[str] = set()
    for module in (*modules, *stand_ins):
        parts = module.split(".")
        packages |= {".".join(parts[:end]) for end in range(1, len(parts))}
    before = dict(sys.modules)
    try:
        for name in sorted(packages - set(modules)):
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(root / name.replace(".", "/")) for root in roots]
        for name, contents in stand_ins.items():
            sys.modules[name] = stand_in = ModuleType(name)
            stand_in.__dict__.update(contents)
        yield [importlib.import_module(module) for module in modules]
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.partition(".")[0] in {module.partition(".")[0] for module in (*modules, *stand_ins)}:
                del sys.modules[name]
        sys.modules.update(before)


if __name__ == "__main__":
    fetch()
