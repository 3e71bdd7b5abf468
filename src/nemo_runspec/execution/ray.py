"""Scripts with `launch = "ray"` on a cluster: a job for a Ray that exists, or a Ray of their own inside a Slurm job.

Submitting to an existing cluster, as a command file puts it together::

    check_launch(spec, env)
    runtime_env = ray_runtime_env(env, job_id, bundle, python_path, variables)
    if cfg.dry_run:
        print(submission_text(env, job_id, runtime_env))
        return 0
    job = submit(env, job_id, runtime_env)
    return follow_ray(job)                  # or: print(how_to_follow(job)); return 0

Inside a Slurm allocation, `nemo_runspec.execution.node` calls `run_in_allocation` on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nemo_runspec.env import Env
from nemo_runspec.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    Interrupted,
    RunFailed,
    UserError,
    debugging,
    report,
)
from nemo_runspec.execution.interrupts import CancelQuestion, noted_signals
from nemo_runspec.execution.launch_script import JOB_DIR, SCRIPT_NAME
from nemo_runspec.execution.local import die_with_parent, exit_code, run_command
from nemo_runspec.runspec import Runspec
from nemo_runspec.secrets import looks_secret

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ENTRYPOINT = f"bash {SCRIPT_NAME}"
RAY_ADDRESS = "RAY_ADDRESS"  # where a script finds the Ray that it is to use
CONNECT_SECONDS = 10.0
# How long a cluster may not answer while a job is followed, in seconds.
PATIENCE_AWAY = 600.0
_INSTALL = "install it: pip install 'nemotron[ray]'"


# --- A job for a cluster that exists --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayJob:
    """A submitted job: its id (Ray's "submission id") and the address of the cluster's dashboard."""

    id: str
    address: str


def check_launch(spec: Runspec, env: Env) -> None:
    """Refuse a script that a Ray cluster cannot start.

    Raises:
        UserError: its launch is not ray or direct.
    """
    if spec.run.launch == "torchrun":
        raise UserError(
            f'{spec.name}: launch = "torchrun" does not run on a Ray cluster, which is what profile {env.profile} is',
            "use a profile with executor slurm, or none",
        )


def new_job_id(name: str) -> str:
    """An id for a job that says what it is and that no other one has: `nano3-data-prep-sft-3f9c2a`."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"{words}-{secrets.token_hex(3)}"


def ray_runtime_env(
    env: Env, job_id: str, bundle: Path, python_path: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """What Ray is told about the processes of a job, its workers included; its dashboard shows it to everybody.

    Args:
        bundle: the folder that becomes the current directory of all of them.
        python_path: folders in it that hold packages.
        variables: those of the job. One whose name is that of a secret stays out; `launch.sh` sets it for the script.
    """
    shown = {name: value for name, value in variables.items() if not looks_secret(name)}
    shown["PYTHONPATH"] = ":".join(python_path)
    if env.output is not None:
        shown.setdefault(JOB_DIR, f"{env.output}/jobs/{job_id}")
    return {"working_dir": str(bundle), "env_vars": shown}


def submission_text(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> str:
    """All that `submit` would send, as text, with `<id>` for what is random in the job's id. Ray is not imported."""
    bundle = Path(str(runtime_env["working_dir"]))
    others = {key: value for key, value in runtime_env.items() if key != "working_dir"}
    command = ["ray", "job", "submit", "--address", _address(env), "--submission-id", job_id]
    command += ["--working-dir", str(bundle), "--runtime-env-json", json.dumps(others), "--", *ENTRYPOINT.split()]
    text = "\n".join(
        [
            f"# {job_id}: submitted as by",
            shlex.join(command),
            "",
            f"# {SCRIPT_NAME}, run where the cluster starts the job",
            (bundle / SCRIPT_NAME).read_text(encoding="utf-8").rstrip(),
            "",
            "# what travels",
            *_contents(bundle),
        ]
    )
    return text.replace(job_id, f"{job_id.rpartition('-')[0]}-<id>")


def submit(env: Env, job_id: str, runtime_env: Mapping[str, Any]) -> RayJob:
    """Hand a job to the cluster of the profile.

    Args:
        job_id: from `new_job_id`.
        runtime_env: from `ray_runtime_env`.

    Raises:
        UserError: Ray is not installed, no cluster answers at the address, or it refuses the job.
    """
    address = _address(env)
    client = _client(address, profile=env.profile)
    try:
        # What travels has been chosen; a .gitignore in it must not choose again.
        with _environment(RAY_RUNTIME_ENV_IGNORE_GITIGNORE="1", RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES=""):
            client.submit_job(entrypoint=ENTRYPOINT, submission_id=job_id, runtime_env=dict(runtime_env))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"the Ray cluster at {address} refused the job: {_reason(error)}") from error
    return RayJob(job_id, address)


def how_to_follow(job: RayJob) -> str:
    """What `--batch` prints: the job's id, and Ray's own commands."""
    ray = f"ray job {{}} --address {shlex.quote(job.address)} {job.id}"
    return "\n".join(
        [
            f"job {job.id}",
            f"  follow   {ray.format('logs')} --follow",
            f"  inspect  {ray.format('status')}",
            f"  cancel   {ray.format('stop')}",
        ]
    )


def follow_ray(job: RayJob) -> int:
    """Follow a job to its end: its log goes to stdout, what Ray does with it to stderr.

    Ctrl-C asks once whether to cancel, and a second one cancels; without a terminal to ask on, the first says what a
    second one does. SIGTERM leaves the job running.

    Returns:
        0 succeeded; the script's own 1, 2, 130 or 143; 1 for whatever else it ended with; 130 cancelled by Ctrl-C; 143
        after SIGTERM.
    """
    question = CancelQuestion()
    with noted_signals() as signals:
        follower = _Follower(job, signals)
        while True:
            try:
                code = follower.run()
            except _Away as error:
                report(RunFailed(f"{error}; job {job.id} not cancelled", how_to_follow(job)))
                return FAILED
            if code is not None:
                return code
            if signal.SIGTERM in signals:
                _say(f"stopped by SIGTERM; job {job.id} not cancelled\n{how_to_follow(job)}")
                return PREEMPTED
            signals.pop(0)
            if question.ask(f"job {job.id}"):
                return follower.cancel()


class _Away(Exception):
    """The cluster does not answer."""


class _Follower:
    """Where following has got to; goes on there after a question."""

    def __init__(self, job: RayJob, signals: list[int]) -> None:
        self.job, self.signals = job, signals
        self.client = _client(job.address)
        self.printed = 0  # characters of the log
        self.shown = ""
        self.last_answer = time.monotonic()

    def run(self) -> int | None:
        """Follow the job to its end, and return its exit code; None as soon as a signal has been noted."""
        while not self.signals:
            try:
                details = self.client.get_job_info(self.job.id)
                self.last_answer = time.monotonic()
                self._show(details.status)
                if details.status.is_terminal():
                    self._rest_of_log()
                    return self._report(details)
                if details.status != "PENDING":
                    asyncio.run(self._stream())
            except (RuntimeError, OSError) as error:  # requests' errors are OSErrors, aiohttp's one or the other
                if time.monotonic() - self.last_answer > PATIENCE_AWAY:
                    raise _Away(f"the Ray cluster at {self.job.address} does not answer: {_reason(error)}") from error
            time.sleep(0.3)
        return None

    def cancel(self) -> int:
        """Ask Ray to stop the job, and follow it to its end: Ray sends SIGTERM and, some seconds later, SIGKILL."""
        self.client.stop_job(self.job.id)
        _say(f"cancelling job {self.job.id}")
        while not (status := self.client.get_job_status(self.job.id)).is_terminal() and not self.signals:
            time.sleep(0.3)
        self._rest_of_log()
        self._show(status)
        report(Interrupted(f"job {self.job.id} cancelled"))
        return INTERRUPTED

    async def _stream(self) -> None:
        """Print the log as it grows, until the job has ended, the connection breaks, or a signal has been noted."""
        skip = self.printed  # the stream begins at the beginning
        stream = self.client.tail_job_logs(self.job.id)
        piece = asyncio.ensure_future(anext(stream))
        while not self.signals:
            done, _ = await asyncio.wait({piece}, timeout=0.2)
            if not done:
                continue
            try:
                text = piece.result()
            except StopAsyncIteration:
                return
            new, skip = text[skip:], max(0, skip - len(text))
            self._print(new)
            self.last_answer = time.monotonic()
            piece = asyncio.ensure_future(anext(stream))
        piece.cancel()

    def _rest_of_log(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the log of a job that never began
            self._print(self.client.get_job_logs(self.job.id)[self.printed :])

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self.printed += len(text)

    def _show(self, status: str) -> None:
        word = str(getattr(status, "value", status)).lower()
        if word != self.shown:
            self.shown = word
            _say(f"job {self.job.id} {word}")

    def _report(self, details: Any) -> int:
        """Say how the job ended, and return its exit code."""
        if details.status == "SUCCEEDED":
            return DONE
        hint = f"log: ray job logs --address {shlex.quote(self.job.address)} {self.job.id}"
        if details.status == "STOPPED":
            report(RunFailed(f"job {self.job.id} was stopped by somebody else", hint))
            return FAILED
        if details.driver_exit_code is None:  # it never ran
            report(RunFailed(f"job {self.job.id} failed: {_reason(details.message)}", hint))
            return FAILED
        code = exit_code(details.driver_exit_code)
        report(RunFailed(f"job {self.job.id} failed with exit code {details.driver_exit_code}", hint))
        return code


def _client(address: str, *, profile: str | None = None) -> JobSubmissionClient:
    whose = "executor ray" if profile is None else f"profile {profile}: executor ray"
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{whose} needs Ray, which is not installed", _INSTALL)
    where = urllib.parse.urlsplit(address)
    port = where.port or (443 if where.scheme == "https" else 80)
    try:  # Ray itself would wait without end for an address that answers nothing
        socket.create_connection((where.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"{whose}: nothing answers at {address}: {error.strerror or error}") from None
    try:
        module = importlib.import_module("ray.job_submission")
        logging.getLogger("ray").setLevel(logging.ERROR)  # after the import, which sets it
        # Ray would rather take the cluster that these name than the one it is given.
        with _environment(RAY_ADDRESS=None, RAY_API_SERVER_ADDRESS=None):
            client: JobSubmissionClient = module.JobSubmissionClient(address)
    except ImportError as error:
        raise UserError(f"{whose}: Ray does not import: {error}", _INSTALL) from None
    except (RuntimeError, OSError, ValueError) as error:
        raise UserError(f"{whose}: no Ray cluster takes jobs at {address}: {_reason(error)}") from error
    return client


def _address(env: Env) -> str:
    assert env.ray is not None, "the profile's executor is ray"
    return env.ray.address


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Inside, these variables are set, or, where None, not set."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _contents(bundle: Path) -> list[str]:
    """The entries of a bundle, a folder as its number of files, with their sizes."""
    lines = []
    for entry in sorted(bundle.iterdir()):
        files = [file for file in entry.rglob("*") if file.is_file()] if entry.is_dir() else [entry]
        size = sum(file.stat().st_size for file in files)
        what = f"{entry.name}/  {len(files)} files," if entry.is_dir() else f"{entry.name} "
        lines.append(f"{what} {size:,} bytes")
    return lines


def _reason(error: object) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- A Ray of the job's own, inside a Slurm allocation ----------------------------------------------------------------

# How long the head may take to answer, and all nodes to join it, in seconds. A node's Ray is up in 5 s on a quiet one.
START_SECONDS = 180.0
# How long a node whose job is being ended waits for the first one to end Ray.
GRACE_SECONDS = 20.0
_STOP_SECONDS = 10.0
# Ray's sockets lie in `FOLDER/session_<date>_<pid>/sockets/`; a socket's path has at most 107 bytes.
_LONGEST_TEMP = 30
_RAY = ("-m", "ray.scripts.scripts")


class _Stopped(BaseException):
    """A signal came before the script was started."""

    def __init__(self, number: int) -> None:
        self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        super().__init__(signal.Signals(number).name)


def run_in_allocation(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None) -> int:
    """A node's part of a script with `launch = "ray"`: all nodes form a Ray cluster, and the first runs the script.

    Slurm says which node this is and where the first one is (MASTER_ADDR, MASTER_PORT: Ray's port). The script finds
    the cluster in RAY_ADDRESS. When it ends, Ray ends, on all nodes. Where RAY_ADDRESS is set already (a job of an
    existing cluster), and on a single node, no Ray is started: the script runs as on one machine.

    Args:
        command: the script's command; only the first node runs it.
        environment: the whole environment of the script and of Ray.

    Returns:
        On the first node the script's exit code; on others 0, also when they are told to leave.

    Raises:
        UserError: Ray is not installed here, or Slurm's variables are not there.
        RunFailed: the nodes did not find each other in time, or Ray ended before the script did.
    """
    node, nodes = int(environment.get("SLURM_NODEID", "0")), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if environment.get(RAY_ADDRESS) or nodes == 1:
        return _run_script(command, environment, workdir) if node == 0 else DONE
    if importlib.util.find_spec("ray") is None:
        raise UserError(f'launch = "ray" on {nodes} nodes needs Ray, which is not installed here', _INSTALL)
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or not port:
        raise UserError(f"{nodes} nodes, but MASTER_ADDR and MASTER_PORT are not set")
    ours = {
        **environment,
        # Whoever reaches the port may use the cluster, as with torchrun's. A profile may ask for tokens instead.
        "RAY_AUTH_MODE": environment.get("RAY_AUTH_MODE", "disabled"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the script has ended: nothing has to move elsewhere
    }
    with _ray_folder() as folder:
        if node > 0:
            return _join(host, int(port), ours, folder)
        return _lead(host, int(port), nodes, command, ours, workdir, folder)


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
        with _signals_stop():
            ray = _start_ray(options, environment, folder)
            count = [sys.executable, "-m", __name__, address, str(nodes), str(START_SECONDS)]
            found = subprocess.Popen(count, env=dict(environment), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
            try:
                while found.poll() is None:
                    if ray.poll() is not None:
                        raise RunFailed(f"Ray did not start on the first node: {_last_line(folder)}")
                    time.sleep(0.1)
            finally:
                found.kill()
            if found.returncode != DONE:
                return FAILED  # it has said why
        with _seen_signals() as seen:
            code = _run_script(command, {**environment, RAY_ADDRESS: address}, workdir)
            # Slurm sends SIGTERM to all processes of the job, Ray's too: a script may find it gone before it has left.
            if code == FAILED and signal.SIGTERM in seen():
                _say("error: stopped by SIGTERM, and Ray with it")
                code = PREEMPTED
            return code
    except _Stopped as stopped:
        return stopped.exit_code
    finally:
        _stop_ray(ray)


def _join(host: str, port: int, environment: Mapping[str, str], folder: Path) -> int:
    """Another node: lend itself to the head until that is gone."""
    told: list[float] = []
    # The first node decides what a signal means; this one leaves with it.
    old = {
        number: signal.signal(number, lambda number, frame: told.append(time.monotonic()))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    ray: subprocess.Popen[bytes] | None = None
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(host, port):
            if told:
                return DONE
            if time.monotonic() > deadline:
                raise RunFailed(f"no Ray answered at {host}:{port}, the first node, within {START_SECONDS:.0f} s")
            time.sleep(0.5)
        ray = _start_ray([f"--address={host}:{port}"], environment, folder)
        unanswered = 0
        while unanswered < 3 and not (told and time.monotonic() - told[0] > GRACE_SECONDS):
            time.sleep(0.5)
            unanswered = 0 if _answers(host, port) else unanswered + 1
            if ray.poll() is not None and unanswered == 0 and not told:
                time.sleep(3)  # the head may be about to end
                if _answers(host, port):
                    raise RunFailed(f"Ray ended on {socket.gethostname()}: {_last_line(folder)}")
        return DONE
    finally:
        _stop_ray(ray)
        for number, handler in old.items():
            signal.signal(number, handler)


def _run_script(command: Sequence[str], environment: Mapping[str, str], workdir: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="runspec-") as left:
        return run_command(command, environment, workdir, Path(left) / "exit_code")


@contextlib.contextmanager
def _ray_folder() -> Iterator[Path]:
    """A folder of this node's Ray alone: on one machine there may be several, of this job and of others."""
    place = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place if len(place) <= _LONGEST_TEMP else "/tmp"))
    try:
        yield folder
    finally:
        if debugging():
            _say(f"logs of Ray: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _start_ray(options: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start this node's Ray, which lives as long as the process that is returned.

    Ports that are not told to others are free ones: two nodes of one job may share a machine.
    """
    words = [sys.executable, *_RAY, "start", "--block", "--disable-usage-stats", f"--temp-dir={folder}", *options]
    words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    if environment.get("SLURM_CPUS_ON_NODE"):
        words.append(f"--num-cpus={environment['SLURM_CPUS_ON_NODE']}")
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
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)
        ray.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_stop() -> Iterator[None]:
    """Inside, SIGTERM, SIGINT and SIGUSR1 raise `_Stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


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
        found = socket.gethostbyname(name)
    except OSError as error:
        raise RunFailed(f"MASTER_ADDR={name}, the first node, has no address: {error}") from None
    if found.startswith("127."):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
    return found


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
