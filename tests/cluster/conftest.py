"""Engines for the tests of this folder: started when a test first asks, stopped at the end, whatever happens.

slurm           the cluster, for one test: afterwards its jobs are cancelled and dead nodes are back
slurm_cluster   the same for fixtures of a wider scope, without that
login_node      an sshd whose sessions see the cluster
ray_cluster     a Ray head with its job server
startup_command what a job runs first to find these tests' Python

All tests here are marked `cluster`. Where an engine cannot run they are skipped and say why;
`make test-cluster` installs what they need.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import ray_cluster as ray_engine
from . import slurm as slurm_engine
from . import sshd
from .ray_cluster import RayCluster
from .slurm import Slurm
from .sshd import LoginNode

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := slurm_engine.missing():
        pytest.skip(f"Slurm: {reason}")
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Slurm) -> Iterator[Slurm]:
    yield slurm_cluster
    slurm_cluster.tidy()


@pytest.fixture(scope="session")
def login_node(slurm_cluster: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoginNode]:
    node = sshd.start(tmp_path_factory.mktemp("login"), {"SLURM_CONF": str(slurm_cluster.conf)})
    yield node
    node.stop()


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if reason := ray_engine.missing():
        pytest.skip(f"Ray: {reason}")
    cluster = ray_engine.start(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def startup_command() -> str:
    activate = Path(sys.prefix) / "bin" / "activate"
    if activate.exists():
        return f"source {shlex.quote(str(activate))}"
    return f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
