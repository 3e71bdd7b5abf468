"""The curation as a user starts it: all steps, a second run that skips, kills that change nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry

from .house import start

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]
for module in ("warcio", "trafilatura", "py3langid", "sklearn"):
    pytest.importorskip(module)

COMMAND = ["-c", "from nemotron.cli.main import main; main()", "data", "curate", "-c", "tiny"]


def curate(root: Path) -> subprocess.Popen[str]:
    """`nemotron data curate -c tiny`; all that it writes is its stdout."""
    artifacts = str(root / "artifacts")
    return start(root, COMMAND, subprocess.STDOUT, NO_COLOR="1", COLUMNS="120", RUNSPEC_ARTIFACTS_ROOT=artifacts)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    return output


def digests(root: Path) -> dict[str, str]:
    registry = Registry(root / "artifacts")
    found = {name: registry.resolve(name).digest for name in registry.names()}
    assert len(found) == 10
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything curated once; `output.txt` is what the command said."""
    folder = tmp_path_factory.mktemp("curated")
    (folder / "output.txt").write_text(finish(curate(folder)), encoding="utf-8")
    return folder


def metrics(root: Path, step: str) -> dict[str, Any]:
    name = "nemotron_cc-data-tiny" if step == "decontaminate" else f"nemotron_cc-{step}-data-tiny"
    metrics: dict[str, Any] = Registry(root / "artifacts").resolve(name).record["metrics"]
    return metrics


def test_no_document_is_lost_between_steps(root: Path) -> None:
    out = None
    for step in (
        "extract",
        "language",
        "exact_dedup",
        "fuzzy_dedup",
        "substring_dedup",
        "quality",
        "pii",
        "heuristics",
        "decontaminate",
    ):
        table = metrics(root, step)["table"]
        dropped = sum(tally["documents"] for tally in table["dropped"].values())
        assert table["read"]["documents"] == table["kept"]["documents"] + dropped, step
        assert out is None or table["read"]["documents"] == out, step
        out = table["kept"]["documents"]
        assert dropped or step in ("substring_dedup", "pii"), f"{step} has nothing to show"


def test_the_table_at_the_end_fits_on_a_screen(root: Path) -> None:
    output = (root / "output.txt").read_text(encoding="utf-8")
    table = output[output.index("What each step has dropped") :]
    assert len(table.strip().split("\n")) <= 40
    for step in ("extract", "language", "exact_dedup", "decontaminate"):
        assert step in table
    assert "left out: rephrase, which needs a model behind an endpoint" in table


def test_a_second_run_skips_every_step(root: Path) -> None:
    before = digests(root)
    output = finish(curate(root))
    states = re.findall(r"^\[(\d+)/(\d+)\] \w+: skipped, published already", output, re.MULTILINE)
    assert len(states) == int(states[0][1])
    assert digests(root) == before


def test_kills_change_nothing(root: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    for _ in range(6):
        process = curate(tmp_path)
        time.sleep(rng.uniform(1, 6))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(curate(tmp_path))
    assert digests(tmp_path) == digests(root)
