"""Imports go one way (docs/architecture/README.md): the contracts of pyproject.toml, and what the help pages load."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def loaded_modules(code: str) -> set[str]:
    """Top-level and dotted names in `sys.modules` after `code` has run in a fresh interpreter."""
    report = "\nimport json, sys\nprint('\\n@' + json.dumps(sorted(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.rsplit("@", 1)[1]))


def test_contracts_of_the_linter_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_sees_every_module() -> None:
    """It follows packages only, so a folder without `__init__.py` would escape the contracts."""
    source = ROOT / "src"
    folders = {folder for path in source.rglob("*.py") for folder in path.parents if source in folder.parents}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_script_begins_before_it_imports_its_libraries() -> None:
    """So that Ctrl-C while they load, a second or more, is a line and no traceback."""
    late = []
    for path in (ROOT / "src/nemotron/recipes").rglob("*.py"):
        blocks = [ast.unparse(node) for node in ast.parse(path.read_text(encoding="utf-8")).body]
        if any(block.startswith("if __name__ == '__main__':") for block in blocks):
            first = next(block for block in blocks[1:] if block != "from __future__ import annotations")
            if not (first.startswith("if __name__ == '__main__':") and first.endswith("begin_script()")):
                late.append(str(path.relative_to(ROOT)))
    assert late == []


def test_help_loads_neither_torch_nor_the_rooms_behind_the_scripts() -> None:
    """Those that tests/nemotron/cli/test_startup.py does not open, one after another in one process."""
    code = "import sys\nfrom nemotron.cli.main import _run\n"
    pages = ("nano3", "nano3 data prep sft", "nano3 rl", "models show", "artifacts lineage")
    for words in pages:
        code += f"sys.argv = ['nemotron', *{words.split()!r}, '--help']\nassert _run() == 0\n"
    modules = loaded_modules(code)
    heavy = {"torch", "numpy", "pyarrow", "transformers", "tokenizers"}
    rooms = {"nemotron.recipes", "nemotron.stack", "nemotron.data_prep"}
    assert not modules & heavy
    assert not {m for m in modules if any(m == room or m.startswith(room + ".") for room in rooms)}


def test_the_toolkit_loads_neither_torch_nor_nemotron() -> None:
    names = [
        str(path.relative_to(ROOT / "src").with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for path in (ROOT / "src/nemo_runspec").rglob("*.py")
        if path.name not in ("__main__.py", "nemo_run_parts.py")  # the latter is NeMo-Run's, and loaded to submit only
    ]
    assert len(names) > 10
    modules = loaded_modules(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)")
    assert not {m for m in modules if m.split(".")[0] in ("torch", "nemotron", "transformers", "tokenizers")}


def test_a_schema_loads_nothing_that_a_dry_run_would_wait_for() -> None:
    """With all that it imports: a config is checked where training's libraries may not even be installed."""
    schemas = sorted(map(str, (ROOT / "src" / "nemotron" / "recipes").rglob("*schema.py")))
    assert len(schemas) > 20
    modules = loaded_modules(f"import runpy\nfor path in {schemas!r}:\n    runpy.run_path(path)")
    assert "pydantic" in modules
    assert not modules & {"torch", "numpy", "pyarrow", "transformers", "tokenizers", "omegaconf"}
    # A schema may import those of other stages.
    assert not {m for m in modules if m.startswith(("nemotron.data_prep", "nemotron.stack"))}
