"""A recipe of another field, which fits a line to points: from an empty folder, with nemo_runspec alone to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import nemo_runspec

Write = Callable[[str, str], Path]

SCHEMA = """
from pydantic import BaseModel, ConfigDict, Field


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Points(Group):
    slope: float = Field(2.0, description="dy/dx of the line that the points lie on")
    count: int = Field(10, ge=2, description="points")


class Run(Group):
    data: str | None = Field(None, description="the points")


class Line(Group):
    run: Run = Field(default_factory=Run)
    points: str = Field(description="file of points, a JSON list of [x, y]")
"""

BLOCK = """
# /// script
# [tool.runspec]
# name = "lines/{name}"
#
# [tool.runspec.config]
# dir = "{name}"
# default = "short"
# schema = "schema.py:{schema}"
# ///
"""

POINTS = '''
"""Make points on a line."""
{block}
import json
import sys
from pathlib import Path

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main


def main() -> None:
    cfg = load_script_config(__file__)
    Path("points.json").write_text(json.dumps([[x, cfg.slope * x + 1] for x in range(cfg.count)]))
    record = {{"type": "Points", "fields": {{"count": cfg.count}}}}
    print(Registry.default().publish(cfg.run.output, "points.json", record, move=True).ref)


if __name__ == "__main__":
    sys.exit(run_main(main))
'''

LINE = '''
"""Fit a line by least squares."""
{block}
import json
import sys
from pathlib import Path

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main


def main() -> None:
    cfg = load_script_config(__file__)
    points = json.loads(Path(cfg.points).read_text())
    x_mean, y_mean = (sum(values) / len(points) for values in zip(*points))
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)
    print(cfg.run.data, round(slope, 9))


if __name__ == "__main__":
    sys.exit(run_main(main))
'''


@pytest.fixture
def runspec(tmp_path: Path, write: Write) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The `nemo-runspec` command in a folder that holds the two scripts and their configs, and nothing else."""
    for name, text, schema in (("points", POINTS, "Points"), ("line", LINE, "Line")):
        write(f"field/{name}.py", text.format(block=BLOCK.format(name=name, schema=schema).strip()))
    write("field/schema.py", SCHEMA)
    write("field/points/short.yaml", "run: {output: 'points-${run.config}'}\ncount: 5\n")
    write("field/line/short.yaml", "run: {data: points-short}\npoints: '${art:data,path}/points.json'\n")
    library = tmp_path / "library"
    library.mkdir()
    (library / "nemo_runspec").symlink_to(Path(nemo_runspec.__file__).parent)
    write("library/nemotron.py", "raise ImportError('of another field')\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RUNSPEC_")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nemo_runspec", *words],
            cwd=tmp_path / "field",
            env={**environment, "PYTHONPATH": str(library)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.slow
def test_show_validate_run_and_read_what_another_script_published(
    runspec: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    spec = json.loads(runspec("show", "line.py", "--json").stdout)
    assert (spec["schema"], spec["family"], spec["stage"]) == ("1", "lines", "line")
    assert runspec("validate", "line.py").stdout == "ok  line/short.yaml\nok  line.py: lines/line\n"

    missing = runspec("run", "line.py", "--dry-run")
    root = tmp_path / "field/output/artifacts"
    assert missing.returncode == 2
    assert "reads     data = points-short:latest (resolved at start)" in missing.stdout  # all that is known without it
    assert missing.stderr == f"error: run.data = points-short: no artifact 'points-short' in {root}\n"

    made = runspec("run", "points.py", "slope=3")
    assert made.stdout.splitlines()[-1] == "points-short:1", made.stderr
    dry = runspec("run", "line.py", "--dry-run")
    assert dry.returncode == 0 and f"points: {root}/points-short/1/payload/points.json" in dry.stdout
    fitted = runspec("run", "line.py")
    assert fitted.stdout.splitlines()[-1] == "points-short:1 3.0", fitted.stderr

    refused = runspec("run", "points.py", "cuont=5")
    assert (refused.returncode, refused.stderr.splitlines()[-1]) == (2, "did you mean count?")
    words = " ".join(done.stdout + done.stderr for done in (missing, made, dry, fitted, refused, runspec("--help")))
    assert "nemotron" not in words.replace(str(tmp_path), "")


def test_no_source_of_the_toolkit_names_what_it_is_used_for() -> None:
    folder = Path(nemo_runspec.__file__).parent
    sources = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert {"runspec.py", "script.py", "config/script.py"} <= sources.keys()
    assert [name for name, text in sources.items() if "nemotron" in text.lower()] == []
