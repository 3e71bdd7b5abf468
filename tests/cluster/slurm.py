"""A real Slurm on this machine: munge, MariaDB, slurmdbd, slurmctld and two nodes with eight pretend GPUs each.

Everything lives in one folder and on free loopback ports; nothing of the machine's configuration is read or written.
Each node has its own PID, mount and UTS namespace (so `hostname` says node1), its own loopback address, and takes its
processes with it when it dies. All daemons run in the foreground as children and get SIGKILL from the kernel when the
process that started them ends, however it ends. Needs root and Debian's packages; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "openssh-server", "openssh-client", "rsync")
COMMANDS = (
    "munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "sacct", "mariadbd", "mariadb-install-db",
    "sshd", "ssh", "rsync", "unshare",
)  # fmt: skip
SBIN = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GPUS = 8
NODES = ("node1", "node2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LIBC = ctypes.CDLL(None)


def missing() -> str | None:
    """Why this machine cannot run the engines, or None."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs for other users, and the nodes are namespaces"
    absent = [name for name in COMMANDS if shutil.which(name, path=SBIN) is None]
    if absent:
        install = f"apt-get install {' '.join(PACKAGES)}"
        return f"not installed: {', '.join(absent)}; `make test-cluster` installs them, or: {install}"
    if subprocess.run(["unshare", "--pid", "--fork", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "this container may not make namespaces (CAP_SYS_ADMIN)"
    return None


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, below those from which the kernel serves outgoing connections."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in chosen:
                chosen.append(port)
    return chosen


def die_with_parent() -> None:
    """For a child, before exec: a process group of its own, and SIGKILL when the thread that started it ends."""
    os.setsid()
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def short_folder(root: Path) -> Path:
    """A folder for sockets, whose paths have at most 107 characters: in `root`, or in /tmp where that is deep."""
    if len(str(root)) > 70:
        return Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))
    folder = root / "sockets"
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # munged warns otherwise
    return folder


def wait_for(what: str, ready: Callable[[], bool], timeout: float = 30.0, interval: float = 0.1) -> None:
    """Poll until `ready()`. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout:g} s")
        time.sleep(interval)


class Daemons:
    """Foreground daemons that end with us. Each writes to `<logs>/<name>.log`."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.namespaces: set[str] = set()

    def start(self, name: str, command: Sequence[str | Path], env: dict[str, str], *unshare: str) -> None:
        """Start one; with options of `unshare` in a PID namespace, where the first process takes all others along."""
        if unshare:
            self.namespaces.add(name)
            command = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", *unshare, *command]
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent, cwd="/"
            )

    def check(self) -> None:
        """Raises RuntimeError with the end of its log for a daemon that has ended by itself."""
        for name, process in self.running.items():
            if process.poll() is not None:
                log = (self.logs / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{log[-2000:]}")

    def listens(self, name: str, port: int, timeout: float = 30.0) -> None:
        """Wait until `name` accepts connections on the loopback port."""

        def ready() -> bool:
            self.check()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(f"{name} on port {port}", ready, timeout, 0.05)

    def kill(self, name: str) -> None:
        """SIGKILL, also for the rest of its process group, and wait until nothing of it is left."""
        process = self.running.pop(name)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if name in self.namespaces:  # `unshare` ends by itself once its namespace is empty
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
                process.wait(timeout=10 if children else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for name in reversed(list(self.running)):
            self.kill(name)


class Slurm:
    """A Slurm cluster under `root`. As a context: inside, both nodes are idle; afterwards no process is left.

    conf   slurm.conf
    env    environment for `sbatch`, `squeue` and the rest: `os.environ` with SLURM_CONF, and sbin folders in PATH

    NODES have 16 CPUs and 8 GPUs each. The account is `test`, the partition `batch`. Requeued jobs start again after
    5 s (cred_expire; 120 s unless set), and a dead node is noticed after about 15 s (SlurmdTimeout).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "slurm.conf"
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "SRUN_", "CUDA_"))
        }
        self.env |= {"SLURM_CONF": str(self.conf), "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"}
        self.logs = root / "logs"
        self.logs.mkdir(parents=True)
        self.sockets = short_folder(root)
        self.daemons = Daemons(self.logs)

    # -- life

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.daemons.stop()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _start(self) -> None:
        self._configure()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.daemons.start("munged", [
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.munge_socket}",
            f"--pid-file={self.root}/munged.pid", f"--log-file={self.logs}/munged-messages.log",
            f"--seed-file={self.root}/munge.seed", "--num-threads=2",
        ], self.env)  # fmt: skip
        self._start_database()
        self.daemons.start("slurmdbd", ["slurmdbd", "-D"], self.env)
        self.daemons.listens("slurmdbd", self.ports["slurmdbd"])
        sacctmgr = "sacctmgr -n -i"
        self.run(f"{sacctmgr} add cluster tests")
        self.run(f"{sacctmgr} add account test Description=tests Organization=tests")
        self.run(f"{sacctmgr} add user root Account=test")
        self.run(f"{sacctmgr} modify user root set DefaultAccount=test")
        self.daemons.start("slurmctld", ["slurmctld", "-D", "-i"], self.env)
        for node in NODES:
            self._start_node(node)
        self.daemons.listens("slurmctld", self.ports["slurmctld"])
        wait_for("idle nodes", lambda: self.node_states() == dict.fromkeys(NODES, "idle"))

    def _start_database(self) -> None:
        data, messages = self.root / "mariadb", self.logs / "mariadb-install-db.log"
        with messages.open("wb") as log:
            subprocess.run(
                ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db",
                 "--auth-root-authentication-method=normal", "--innodb-log-file-size=8M"],
                check=True, env=self.env, stdout=log, stderr=log,
            )  # fmt: skip
        port = self.ports["mariadb"]
        self.daemons.start("mariadbd", [
            "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", "--bind-address=127.0.0.1",
            f"--port={port}", f"--socket={self.sockets}/mariadb.sock", f"--pid-file={self.root}/mariadb.pid",
            "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
            "--performance-schema=OFF", "--skip-name-resolve",
        ], self.env)  # fmt: skip
        self.daemons.listens("mariadbd", port)

    def _configure(self) -> None:
        names = ["mariadb", "slurmdbd", "slurmctld", *NODES]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.munge_socket = self.sockets / "munge.sock"
        host = socket.gethostname().partition(".")[0]
        for folder in ("state", *(f"{node}/{part}" for node in NODES for part in ("spool", "devices"))):
            (self.root / folder).mkdir(parents=True)
        for node in NODES:
            for gpu in range(GPUS):  # like /dev/null: Slurm derives CUDA_VISIBLE_DEVICES from their names
                os.mknod(self.root / node / "devices" / f"nvidia{gpu}", 0o20666, os.makedev(1, 3))
        addresses = {node: f"127.0.1.{number + 1}" for number, node in enumerate(NODES)}
        hosts = ["127.0.0.1 localhost", f"127.0.0.1 {host}", *(f"{addresses[node]} {node}" for node in NODES)]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")

        def node_line(node: str) -> str:
            return (
                f"NodeName={node} NodeHostname={host} NodeAddr={addresses[node]} Port={self.ports[node]}"
                f" CPUs=16 RealMemory=20000 Gres=gpu:{GPUS} State=UNKNOWN"
            )

        write_private(self.root / "gres.conf", "".join(
            f"NodeName={node} Name=gpu File={self.root}/{node}/devices/nvidia[0-{GPUS - 1}]\n" for node in NODES
        ))  # fmt: skip
        write_private(
            self.root / "slurmdbd.conf",
            f"""\
AuthType=auth/munge
AuthInfo=socket={self.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={self.ports["slurmdbd"]}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={self.ports["mariadb"]}
StorageUser=root
StorageLoc=slurm
PidFile={self.root}/slurmdbd.pid
""",
        )
        write_private(
            self.conf,
            f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.ports["slurmctld"]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.munge_socket},cred_expire=5
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/%n/spool
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/%n/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={self.ports["slurmdbd"]}
AccountingStoragePass={self.munge_socket}
AccountingStorageEnforce=associations
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=2
ReturnToService=2
{chr(10).join(node_line(node) for node in NODES)}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""",
        )

    def _start_node(self, node: str) -> None:
        # The shell is process 1 of the node: it adopts and reaps what slurmd leaves to it, and its end is everybody's.
        script = (
            f"hostname {node}; mount --bind {shlex.quote(str(self.root / 'hosts'))} /etc/hosts; "
            f"slurmd -D -N {node} & wait $!"
        )
        self.daemons.start(node, ["bash", "-c", script], self.env, "--uts")

    # -- for tests

    def run(self, command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A shell command as on a login node. With `check`, RuntimeError with its output where it fails."""
        done = subprocess.run(
            ["bash", "-c", command], env=self.env, cwd=self.root, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def node_states(self) -> dict[str, str]:
        """{"node1": "idle", ...}: `idle`, `mix`, `alloc`, `down`, with `*` where the node does not answer."""
        self.daemons.check()
        done = self.run("sinfo -h -N -p batch -o '%N %t'", check=False)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def kill_node(self, name: str) -> None:
        """The node and all its processes are gone at once, as after a power cut. Slurm notices within about 15 s."""
        self.daemons.kill(name)

    def tidy(self) -> None:
        """Cancel all jobs, bring back dead nodes, wait until everything is idle."""
        self.run("scancel --full --signal=KILL --user=root; scancel --user=root")
        for node in NODES:
            if node not in self.daemons.running:
                self._start_node(node)
        wait_for("idle nodes", lambda: self.node_states() == dict.fromkeys(NODES, "idle"), 60)

    def scontrol(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, Reason, ExitCode, NodeList, ...; {} once forgotten."""
        done = self.run(f"scontrol -o show job {shlex.quote(job)}", check=False)
        return dict(re.findall(r"(?:^| )([A-Za-z/:_]+)=(\S*)", done.stdout)) if done.returncode == 0 else {}

    def end_state(self, job: str) -> str:
        """Wait until the accounting has the job in one of ENDED, and return that. Raises TimeoutError.

        The accounting lags by seconds: a requeued job keeps the end of its first attempt for a while. `scontrol()`
        knows what is true now.
        """
        state = ""

        def has_ended() -> bool:
            nonlocal state
            state = self.run(f"sacct -n -X --parsable2 -j {job} --format=State").stdout.strip().partition(" ")[0]
            return state in ENDED

        wait_for(f"end of job {job}", has_ended, 60, 0.3)
        return state


def write_private(path: Path, text: str) -> None:
    """A file for root only: slurmdbd refuses anything else."""
    path.write_text(text)
    path.chmod(0o600)
