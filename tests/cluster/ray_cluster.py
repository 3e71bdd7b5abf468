"""A Ray head on this machine, with the dashboard and its job server on loopback, as `ray job submit` finds it.

All of Ray's processes live in one PID namespace and end with the process that started them. Needs root for that, and
the extra `ray`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from .slurm import Daemons, free_ports, short_folder, wait_for

# Ray takes 127.0.0.1 for a mistake and listens on the machine's outer address instead.
ADDRESS = "127.0.2.1"
GPUS = 2  # pretend ones: Ray hands out CUDA_VISIBLE_DEVICES by number


def missing() -> str | None:
    """Why this machine cannot run Ray, or None."""
    if os.geteuid() != 0:
        return "needs root: Ray's processes get a namespace, so that none outlives the tests"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed; `make test-cluster` does it"
    return None


@dataclass
class RayCluster:
    """One node, 4 CPUs, 2 pretend GPUs.

    address   of the job server, "http://127.0.0.1:PORT"
    env       for subprocesses that submit: `os.environ` with RAY_API_SERVER_ADDRESS and RAY_AUTH_MODE
    secret    (name, value) of a variable that the cluster's own environment has, and `env` has not
    """

    root: Path
    address: str
    env: dict[str, str]
    secret: tuple[str, str]
    temp_dir: Path
    daemons: Daemons = field(repr=False)

    def get(self, path: str) -> object:
        """JSON of the dashboard's HTTP interface, `get("/api/jobs/")`. Raises OSError."""
        with urllib.request.urlopen(f"{self.address}{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def stop(self) -> None:
        self.daemons.stop()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def start(root: Path) -> RayCluster:
    """Start the head and wait until its job server answers."""
    (root / "logs").mkdir(parents=True)
    temp_dir = short_folder(root)
    gcs, dashboard, client, agent, agent_grpc, metrics, runtime_env = free_ports(7)
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    secret = ("CLUSTER_TEST_SECRET", secrets.token_hex(16))
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RUNSPEC_", "CUDA_"))}
    # Jobs start with the node's PATH: `python` is the one of these tests.
    path = f"{Path(sys.executable).parent}:{ours.get('PATH', '')}"
    head = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
        f"--node-ip-address={ADDRESS}", f"--port={gcs}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}",
        f"--runtime-env-agent-port={runtime_env}", "--num-cpus=4", f"--num-gpus={GPUS}",
        "--object-store-memory=100000000", f"--temp-dir={temp_dir}",
    ]  # fmt: skip
    address = f"http://127.0.0.1:{dashboard}"
    cluster = RayCluster(
        root, address, ours | settings | {"RAY_API_SERVER_ADDRESS": address}, secret, temp_dir, Daemons(root / "logs")
    )

    def answers() -> bool:
        cluster.daemons.check()
        try:
            return cluster.get("/api/jobs/") == []
        except (OSError, urllib.error.HTTPError, ValueError):
            return False

    try:
        cluster.daemons.start("ray", head, ours | settings | {"PATH": path, secret[0]: secret[1]}, "--mount")
        wait_for("Ray's job server", answers, timeout=120, interval=0.25)
    except BaseException:
        cluster.stop()
        raise
    return cluster
