"""No test depends on where the person who runs it keeps outputs, artifacts and profiles, on a GPU, nor on a clock.

Subprocesses of tests import the code of this checkout.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

for _name in ("RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ENV_FILE", "RAY_ADDRESS"):
    os.environ.pop(_name, None)  # before any module of tests copies the environment for its subprocesses
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")

# Hundreds of tests start a process, which would compile all that it imports of this checkout, and so would each worker
# of pytest-xdist with the tests, where the environment says to keep no bytecode (as images of containers do).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Where a shell started the tests in the background, they and their subprocesses would ignore Ctrl-C, which some test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Tests and their subprocesses compute on the CPU, whatever the machine has, but for `pytest -m gpu`."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")


@pytest.fixture(autouse=True)
def _ctrl_c_arrives_after_each_test() -> Iterator[None]:
    """A command that gives its place to a tool holds Ctrl-C back for it; where none came, subprocesses inherit that."""
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
