"""A Ray of a job's own, over the nodes of its allocation, for a script with `launch = "ray"`.

`nemo_runspec.execution.node` calls `run_in_allocation` on every node.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from nemo_runspec.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    RunFailed,
    UserError,
    debugging,
    report,
)
from nemo_runspec.execution.interrupts import handling, say
from nemo_runspec.execution.local import die_with_parent, run_command
from nemo_runspec.execution.place import Place, first_node
from nemo_runspec.installation import install_line
from nemo_runspec.variables import CPUS_PER_NODE, RAY_ADDRESS

# How long the head may take to answer, and all nodes to join it, in seconds. A node's Ray is up in 5 s on a quiet one.
START_SECONDS = 180.0
# How long a node whose job is being ended waits for the first one to end Ray.
GRACE_SECONDS = 20.0
_STOP_SECONDS = 10.0
# Ray's sockets lie in `FOLDER/session_<date>_<pid>/sockets/`; a socket's path has at most 107 bytes.
_LONGEST_TEMP = 30
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_RAY = ("-m", "ray.scripts.scripts")


class _Stopped(BaseException):
    """A signal came before the script was started."""

    def __init__(self, number: int) -> None:
        self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        super().__init__(signal.Signals(number).name)


def run_in_allocation(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None, here: Place) -> int:
    """A node's part of a script with `launch = "ray"`: all nodes form a Ray cluster, and the first runs the script.

    The nodes meet at the first one (`first_node`: Ray's address and port). The script finds the cluster in RAY_ADDRESS.
    When it ends, Ray ends, on all nodes. Where RAY_ADDRESS is set already (a job of an
    existing cluster), and on a single node, no Ray is started: the script runs as on one machine.

    Args:
        command: the script's command; only the first node runs it.
        environment: the whole environment of the script and of Ray.

    Returns:
        On the first node the script's exit code; on others 0, also when they are told to leave.

    Raises:
        UserError: Ray is not installed here, or nothing says where the first node is.
        RunFailed: the nodes did not find each other in time, or Ray ended before the script did.
    """
    if environment.get(RAY_ADDRESS) or here.nodes == 1:
        return _run_script(command, environment, workdir) if here.node == 0 else DONE
    host, port = first_node(here)
    if importlib.util.find_spec("ray") is None:
        message = f'launch = "ray" on {here.nodes} nodes needs Ray, which is not installed here'
        raise UserError(message, install_line("ray"))
    ray_environment = {
        **environment,
        # Whoever reaches the port may use the cluster, as with torchrun's. A profile may ask for tokens instead.
        "RAY_AUTH_MODE": environment.get("RAY_AUTH_MODE", "disabled"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the script has ended: nothing has to move elsewhere
    }
    with ray_folder() as folder:
        if here.node > 0:
            return _join(host, port, ray_environment, folder)
        return _lead(host, port, here.nodes, command, ray_environment, workdir, folder)


def _lead(
    host: str,
    port: int,
    nodes: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    workdir: Path | None,
    folder: Path,
) -> int:
    """The first node: start the head, wait for the others, run the script."""
    ip = _own_ip(host)
    address = f"{ip}:{port}"
    options = ["--head", f"--node-ip-address={ip}", f"--port={port}", "--include-dashboard=false"]
    options.append(f"--ray-client-server-port={_free_port()}")
    ray: subprocess.Popen[bytes] | None = None
    try:
        with handling(_SIGNALS, _stop):
            ray = _start_ray(options, environment, folder)
            count = [sys.executable, "-m", __name__, address, str(nodes), str(START_SECONDS)]
            counter = subprocess.Popen(
                count, env=dict(environment), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
            try:
                while counter.poll() is None:
                    if ray.poll() is not None:
                        raise RunFailed(f"Ray did not start on the first node: {_last_line(folder)}")
                    time.sleep(0.1)
            finally:
                counter.kill()
            if counter.returncode != DONE:
                return FAILED  # it has said why
        with _seen_signals() as seen:
            code = _run_script(command, {**environment, RAY_ADDRESS: address}, workdir)
            # Slurm sends SIGTERM to all processes of the job, Ray's too: a script may find it gone before it has left.
            if code == FAILED and signal.SIGTERM in seen():
                say("error: stopped by SIGTERM, and Ray with it")
                code = PREEMPTED
            return code
    except _Stopped as stopped:
        return stopped.exit_code
    finally:
        _stop_ray(ray)


def _join(host: str, port: int, environment: Mapping[str, str], folder: Path) -> int:
    """Another node: lend itself to the head until that is gone."""
    signalled_at: list[float] = []
    ray: subprocess.Popen[bytes] | None = None
    with contextlib.ExitStack() as stack:
        # The first node decides what a signal means; this one leaves with it.
        stack.enter_context(handling(_SIGNALS[:2], lambda number, frame: signalled_at.append(time.monotonic())))
        stack.enter_context(handling(_SIGNALS[2:], signal.SIG_IGN))
        stack.callback(lambda: _stop_ray(ray))
        deadline = time.monotonic() + START_SECONDS
        while not _answers(host, port):
            if signalled_at:
                return DONE
            if time.monotonic() > deadline:
                raise RunFailed(f"no Ray answered at {host}:{port}, the first node, within {START_SECONDS:.0f} s")
            time.sleep(0.5)
        ray = _start_ray([f"--address={host}:{port}"], environment, folder)
        unanswered = 0
        while unanswered < 3 and not (signalled_at and time.monotonic() - signalled_at[0] > GRACE_SECONDS):
            time.sleep(0.5)
            unanswered = 0 if _answers(host, port) else unanswered + 1
            if ray.poll() is not None and unanswered == 0 and not signalled_at:
                time.sleep(3)  # the head may be about to end
                if not signalled_at and _answers(host, port):
                    raise RunFailed(f"Ray ended on {socket.gethostname()}: {_last_line(folder)}")
        return DONE


def _run_script(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="runspec-") as left:
        return run_command(command, environment, workdir, Path(left) / "exit_code")


@contextlib.contextmanager
def ray_folder() -> Iterator[Path]:
    """A folder of a Ray of its own: on one machine there may be several, of this job and of others."""
    place = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place if len(place) <= _LONGEST_TEMP else "/tmp"))
    try:
        yield folder
    finally:
        if debugging():
            say(f"logs of Ray: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _start_ray(options: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start this node's Ray, which lives as long as the process that is returned.

    Ports that are not told to others are free ones: two nodes of one job may share a machine.
    """
    words = [sys.executable, *_RAY, "start", "--block", "--disable-usage-stats", f"--temp-dir={folder}", *options]
    words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if environment.get(CPUS_PER_NODE):
        words.append(f"--num-cpus={environment[CPUS_PER_NODE]}")
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            words,
            env={name: value for name, value in environment.items() if name != RAY_ADDRESS},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_before_ray,
        )


def _before_ray() -> None:
    # Slurm warns all processes of the job with SIGUSR1; Ray would die of it before the script has heard.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def _stop_ray(ray: subprocess.Popen[bytes] | None) -> None:
    """End Ray on this node, whatever it takes. Signals can wait: the exit code is known."""
    if ray is None:
        return
    with handling(_SIGNALS, signal.SIG_IGN):
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)
        ray.wait()


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(number)


@contextlib.contextmanager
def _seen_signals() -> Iterator[Callable[[], bytes]]:
    """Yields a function that returns the numbers of the signals that came inside, whoever has handlers for them."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def seen() -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(reader, 4096)
        return b""

    try:
        yield seen
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _own_ip(name: str) -> str:
    """The address under which others reach this node, which they call `name`.

    Many systems give a machine its own name on the loopback; then it is the address that packets leave from.
    """
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise RunFailed(f"MASTER_ADDR={name}, the first node, has no address: {error}") from None
    if address.startswith("127."):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
    return address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _last_line(folder: Path) -> str:
    lines = (folder / "start.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in reversed(lines) if line.strip()), "no reason")


def wait_for_nodes(address: str, nodes: int, seconds: float) -> int:
    """Wait until so many nodes are in the cluster at `address`; in a process of its own, since Ray takes it over.

    Returns:
        0 they are there; 1 not within `seconds`, which has been reported.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while not _answers(host, int(port)):
        if time.monotonic() > deadline:
            report(RunFailed(f"Ray did not answer at {address} within {seconds:.0f} s"))
            return FAILED
        time.sleep(0.2)
    import ray

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    while True:
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        if alive >= nodes:
            return DONE
        if time.monotonic() > deadline:
            report(RunFailed(f"{alive} of {nodes} nodes joined the Ray at {address} within {seconds:.0f} s"))
            return FAILED
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
