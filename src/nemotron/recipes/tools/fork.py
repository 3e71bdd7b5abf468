"""A project of its own from one family, for `nemotron fork`, which starts this script.

What is copied: the family's recipe and command files, the scripts of other families that its steps and configs name
with the modules and configs which these need in turn, and the templates of `fork_project/`. What changes in them: the
names of packages, commands, artifacts, runs and output folders. A published model keeps its name, and so do a chat
template that is called after it, and what belongs to the cookbook (its documents, `nemotron data tokenize -c
nano3_pretrain`).
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import importlib.metadata
import keyword
import os
import posixpath
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import jinja2
import yaml

from nemo_runspec import __version__
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.installation import own_distribution
from nemo_runspec.runspec import find_script, parse
from nemo_runspec.user_files import expanded
from nemotron.kit.steps import RECIPES, STEPS_FILE, Recipe, RecipeStep, read_recipe
from nemotron.recipes.tools.options import run_tool
from nemotron.recipes.tools.whole_folder import in_one_step

COMMANDS = RECIPES.parent / "cli" / "commands"
TEMPLATES = Path(__file__).parent / "fork_project"
SUFFIXES = (".py", ".yaml", ".toml", ".md", ".jinja")  # of a recipe's files; an editor's and caches stay
WIDTH = 120  # columns of a line of imports, as in the fork's pyproject.toml
IMPORTED = re.compile(r"from nemotron\.recipes\.([\w.]+) import (\w+)")
SCHEMA = re.compile(r'^# schema = "(?P<file>[\w.]+):', re.MULTILINE)
# One `from … import …`, over several lines where it has brackets.
IMPORT = re.compile(r"^(?P<indent> *)from (?P<module>[\w.]+) import (?:\([^)]*\)|[^\n(]*)\n", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Options:
    """Of `nemotron fork`."""

    family: str
    name: str
    into: str | None


def families() -> list[str]:
    """The families that can be forked: recipes whose steps belong together."""
    recipes = (read_recipe(file.parent) for file in sorted(RECIPES.glob(f"*/{STEPS_FILE}")))
    return [recipe.folder.name for recipe in recipes if recipe.pipe]


def check_name(name: str) -> None:
    """UserError where `name` cannot be that of a package, of artifacts and of a command at once, or is taken."""
    if keyword.iskeyword(name):
        raise UserError(f"{name!r} is a word of Python", "another name")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r} cannot be the name of a package", "lower-case letters, digits and _, as in my_model")
    if name in families():
        raise UserError(f"{name} is a family of this cookbook", "another name")
    found = name in sys.stdlib_module_names or PathFinder.find_spec(name, sys.path[1:])  # the first is this folder
    if found:
        origin = getattr(found, "origin", None) or "Python's own"
        raise UserError(f"a fork called {name} would hide a module of that name: {origin}", "another name")
    for family in families():  # Python finds what lies beside a script before the package
        if any((RECIPES / family).rglob(f"{name}.py")):
            raise UserError(f"a module beside the scripts of {family} is called {name}", "another name")


def borrowed(recipe: Recipe) -> dict[Path, Path | None]:
    """Files of other families that `recipe` needs, in turn: scripts that its steps and configs name, their schemas and
    the modules that they import, configs that `defaults:` names.

    Beside a script stands the folder of the configs that `recipe` has for it; None beside the others.
    """
    needed = set[Path]()
    scripts = {step.script: step.configs or parse(step.script).config_dir for step in recipe.steps}
    folders = sorted(scripts.values(), key=lambda folder: len(folder.parts), reverse=True)
    pending = [*files_of(recipe.folder), *scripts]
    while pending:
        file = pending.pop()
        text = file.read_text(encoding="utf-8")
        found: list[Path] = []
        if file.suffix == ".py":
            for module, name in IMPORTED.findall(text):
                base = RECIPES / module.replace(".", "/")
                found += [path for path in (base.with_suffix(".py"), base / f"{name}.py") if path.is_file()]
            found += [file.parent / match["file"] for match in SCHEMA.finditer(text)]
        elif file.suffix == ".yaml":
            values = yaml.safe_load(text) or {}
            found += [path for path in _defaults(values, file.parent) if path.is_file()]
            if script := (values.get("run") or {}).get("script"):
                place = find_script(file.parent, script)
                if place.is_file():
                    scripts.setdefault(place, next((top for top in folders if file.is_relative_to(top)), file.parent))
                    found.append(place)
        if not file.is_relative_to(recipe.folder):
            needed.add(file)
        pending += [path for path in found if not path.is_relative_to(recipe.folder) and path not in needed]
    for file in list(needed):
        for folder in file.relative_to(RECIPES).parents:
            package = RECIPES / folder / "__init__.py"
            if folder != Path() and package.is_file():
                needed.add(package)
    return {file: scripts.get(file) for file in needed}  # what a module imports, a config may name later on


def _defaults(values: dict[str, Any], folder: Path) -> list[Path]:
    names = [name for name in values.get("defaults") or [] if name != "_self_"]
    return [Path(os.path.normpath(folder / f"{name}.yaml")) for name in names]


def files_of(folder: Path) -> list[Path]:
    """The files of a folder of the cookbook that are its own."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def project_files(family: str, name: str) -> dict[str, str]:
    """Every file of the fork: its path in the project -> its text."""
    recipe, package = read_recipe(RECIPES / family), f"src/{name}"
    files: dict[str, str] = {}
    for path in files_of(recipe.folder):
        files[f"{package}/recipes/{name}/{path.relative_to(recipe.folder).as_posix()}"] = path.read_text("utf-8")
    for path, configs in borrowed(recipe).items():
        text = path.read_text("utf-8")
        if configs is not None:  # the block of the script names the configs that it has here
            place = configs.relative_to(RECIPES).as_posix()
            text = re.sub(r'^# dir = ".*"', f'# dir = "../../{place}"', text, count=1, flags=re.MULTILINE)
        files[f"{package}/recipes/{path.relative_to(RECIPES).as_posix()}"] = text
    files = {path: renamed(text, recipe, name) for path, text in files.items()}
    for path in files_of(COMMANDS / family):
        text = renamed(path.read_text("utf-8"), recipe, name)
        text = re.sub(rf"(?<![\w.]){family}(?![\w-])", name, text)  # in a command file it means nothing but itself
        text = text.replace('help="Nemotron', f'help="{name}, a fork of Nemotron') if path.name == "app.py" else text
        files[f"{package}/commands/{path.relative_to(COMMANDS / family).as_posix()}"] = text
    readme = f"{package}/recipes/{name}/README.md"
    files[readme] = _own_readme(files[readme], family, name)
    files[f"{package}/recipes/__init__.py"] = f'"""The recipe of {name}, and the scripts of other families in it."""\n'
    files |= _written(recipe, name, files)
    return {path: sorted_imports(text) if path.endswith(".py") else text for path, text in files.items()}


def renamed(text: str, recipe: Recipe, name: str) -> str:
    """`text` with the fork's name where the family's is one of a package, command, artifact, run or output folder."""
    family = recipe.folder.name
    words = "|".join(sorted({recipe.words(step)[0] for step in recipe.steps} | {"pipe", "chat", "model"}))
    for pattern, new in (
        (rf"\bnemotron {family}\b", name),  # a command
        (rf"\bnemotron\.cli\.commands\.{family}\b", f"{name}.commands"),
        (r"\bnemotron\.cli\.recipe_dir\b", f"{name}.recipe_dir"),
        (rf"\bnemotron\.recipes\.{family}\b", f"{name}.recipes.{name}"),
        (r"\bnemotron\.recipes\.(?!tools\b)(?=\w)", f"{name}.recipes."),  # what came with it of another family
        (rf"\bsrc/nemotron/recipes/{family}\b", f"src/{name}/recipes/{name}"),
        (r"\bunder cli/commands/", f"under src/{name}/commands/"),
        (rf"(?<!docs/recipes/)(?<![\w-]){family}(?=/|-[a-zA-Z])", name),  # nano3/sft, nano3-sft-model; not nano3-30b
        (rf"\b(family: ){family}\b", rf"\g<1>{name}"),
        (rf"`{family} (?={words})", f"`{name} "),
    ):
        text = re.sub(pattern, new, text)
    return text


def sorted_imports(text: str) -> str:
    """`text` with its imports in order again, which the package's new name has changed, none wider than a line."""
    blocks: list[list[re.Match[str]]] = []
    for statement in IMPORT.finditer(text):
        above = blocks[-1][-1] if blocks else None
        if above is not None and above.end() == statement.start() and above["indent"] == statement["indent"]:
            blocks[-1].append(statement)
        else:
            blocks.append([statement])
    for block in reversed(blocks):
        in_order = sorted(block, key=lambda statement: statement["module"])
        text = text[: block[0].start()] + "".join(map(_narrow, in_order)) + text[block[-1].end() :]
    return text


def _narrow(statement: re.Match[str]) -> str:
    if len(statement[0]) <= WIDTH + 1 or "(" in statement[0]:
        return statement[0]
    head, _, names = statement[0].rstrip().partition(" import ")
    indent = statement["indent"]
    return f"{head} import (\n" + "".join(f"{indent}    {name},\n" for name in names.split(", ")) + f"{indent})\n"


def _own_readme(text: str, family: str, name: str) -> str:
    """The recipe's page: whose fork it is, and where it speaks of the cookbook's documents, without a link to them."""
    title, _, rest = text.partition("\n")
    at = f"src/nemotron/recipes/{family}"
    rest = LINK.sub(
        lambda link: f"{link['text']} (`{posixpath.normpath(posixpath.join(at, link['path']))}` of the cookbook)", rest
    )
    model = title.lstrip("# ")
    about = (
        f"A copy of the cookbook's {family}, version {__version__}. {model} is the published model here, and\n"
        f"numbers that were reached are those of the recipe as it was copied.\n"
    )
    return f"# {name}, a fork of {model}\n\n{about}{rest}"


def _written(recipe: Recipe, name: str, files: dict[str, str]) -> dict[str, str]:
    """What a project has beside its recipe: the templates, filled in, and the licence of what was copied."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    others = sorted({path.split("/")[3] for path in files if path.count("/") > 3 and "/recipes/" in path} - {name})
    values = {
        "name": name,
        "family": recipe.folder.name,
        "version": __version__,
        "others": others,
        "training": next(_command(recipe, step) for step in recipe.piped if recipe.words(step)[0] == "pretrain"),
    }
    own = {
        path.relative_to(TEMPLATES).as_posix().replace("NAME", name).removesuffix(".jinja"): environment.get_template(
            path.relative_to(TEMPLATES).as_posix()
        ).render(values)
        for path in sorted(TEMPLATES.rglob("*.jinja"))
    }
    own[".gitignore"] = own.pop("gitignore")
    return own | ({"LICENSE": text} if (text := _license()) else {})


def _command(recipe: Recipe, step: RecipeStep) -> str:
    """The words of a step's command behind `nemotron FAMILY`, with the config that `pipe -c tiny` gives it."""
    return " ".join([*recipe.words(step), "-c", f"tiny{step.config_suffix}"])


def _license() -> str | None:
    """The text of the cookbook's licence, in a clone and in a wheel; None where the package lies alone."""
    own = own_distribution()
    if own is None:
        return None
    if own.clone is not None:
        return (own.clone / "LICENSE").read_text("utf-8")
    files = importlib.metadata.files(own.name) or []
    return next((file.read_text("utf-8") for file in files if file.name == "LICENSE"), None)


def write_project(files: dict[str, str], target: Path) -> None:
    """Write all files or none: into a folder of its own, which then becomes `target`.

    UserError: it is there and not empty, or the folder that it is to be in is not.
    """
    if (target.is_symlink() or target.exists()) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder", "--into names another one")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent}", "make it first, or name another one by --into")
    with in_one_step(target.resolve(), [], "fork") as folder:
        try:
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {error.filename or target}: {error.strerror}") from None


def main(options: Options) -> None:
    """Fork, and print what comes next."""
    if options.family not in families():
        raise UserError(f"no family {options.family!r}", did_you_mean(options.family, families()))
    check_name(options.name)
    target = expanded(options.into or options.name).absolute()
    files = project_files(options.family, options.name)
    write_project(files, target)
    print(f"{target}: {len(files)} files, of {options.family}", file=sys.stderr)
    print(f"cd {shlex.quote(str(expanded(options.into or options.name)))}\npip install -e '.[dev]'")
    print(f"{options.name} pipe -c smoke")


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
