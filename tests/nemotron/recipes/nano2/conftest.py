"""Every test begins in an empty folder, as a process does: nothing was loaded, nothing was read from a pipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron.kit import artifact, pipes


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    artifact._scripts[:] = [artifact._Script()]
    pipes._read = None
