"""What contract tests share: those that read the libraries' sources are skipped where these are missing."""

from __future__ import annotations

import pytest
from sources import FOLDER, pins

HERE = all((FOLDER / pin).is_dir() for pin in pins())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip from here, not by a mark of each test: so all of them are one line of the summary."""
    if not HERE and "libraries" in getattr(item, "fixturenames", ()):
        pytest.skip("the libraries' sources are not here: `make contracts`")


@pytest.fixture
def libraries() -> None:
    """Asked for by the modules whose tests read the libraries' sources."""
