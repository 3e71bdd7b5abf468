"""Engines for the tests of this folder: started when a test first asks, stopped at the end, whatever happens.

slurm           the cluster, for one test: afterwards its jobs are cancelled and dead nodes are back
slurm_cluster   the same for fixtures of a wider scope, without that
login_node      an sshd whose sessions see the cluster
ray_cluster     a Ray head with its job server
startup_command what a job runs first to find these tests' Python
make_desk       a folder in which commands are given; its profile `slurm` is both nodes
desk            one of them
s3, bucket      an S3 and a Google Cloud Storage, which this process finds

All tests here are marked `cluster`. Where an engine cannot run they are skipped and say why;
`make test-cluster` installs what they need.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import ray_cluster as ray_engine
from . import slurm as slurm_engine
from . import sshd
from .desk import Desk
from .gcs import bucket_fixture  # noqa: F401
from .ray_cluster import RayCluster
from .s3 import s3_fixture, s3_server_fixture  # noqa: F401
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


@pytest.fixture(scope="session")
def make_desk(slurm_cluster: Slurm, startup_command: str) -> Callable[[Path], Desk]:
    def make(folder: Path) -> Desk:
        desk = Desk(folder, slurm_cluster.env)
        desk.profile(
            "slurm", executor="slurm", account="test", partition="batch", nodes=2, gpus_per_node=0, time="10",
            env={"OMP_NUM_THREADS": "1"}, startup_commands=[startup_command],
        )  # fmt: skip
        return desk

    return make


@pytest.fixture
def desk(slurm: Slurm, make_desk: Callable[[Path], Desk], tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk")
