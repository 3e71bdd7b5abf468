"""What `launch.sh` starts on every node of a cluster job: `python -m nemo_runspec.execution.node launch.json`.

    torchrun    the script, `processes_per_node` times on each node, under torchrun with a fixed rendezvous, or under
                NVRx's ft_launcher with one where the nodes meet
    direct      the script, once, on the first node
    ray         the script, once, on the first node, on a Ray cluster over all nodes

`place` says which node this is. Slurm sends its signals to every process of the job, and kills all nodes as soon as one
has failed. So the nodes leave together, with the exit code of the first: what rank 0 still writes is complete, and the
script's own exit code is that of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from nemo_runspec.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    REFUSED,
    WAIT_FOR_RANK_0,
    RunspecError,
    UserError,
    report,
    run_main,
)
from nemo_runspec.execution.launch_script import Launch, read_launch
from nemo_runspec.execution.local import (
    code_in,
    local_environment,
    run_command,
    script_words,
    under_ft_launcher,
    under_torchrun,
)
from nemo_runspec.execution.place import Place, first_node, place
from nemo_runspec.variables import JOB_DIR, OUTPUT_ROOT
from nemo_runspec.write import write_in_one_step

# A node that failed waits so long for the first one, in seconds, which knows the script's exit code if it ends too.
WAIT_AFTER_FAILURE = 60


def node_command(launch: Launch, bundle: Path, here: Place) -> list[str]:
    """The words that this node runs.

    Args:
        bundle: the folder that the paths of `launch` are relative to.

    Raises:
        UserError: several nodes, and nothing says where the first one is.
    """
    words = script_words(launch.cmd, bundle / launch.script, bundle / launch.config)
    if launch.launch != "torchrun" or here.nodes * launch.processes_per_node == 1:
        return words
    options = [f"--nproc-per-node={launch.processes_per_node}", *launch.launcher_options]
    if launch.launcher == "ft_launcher":  # which knows one rendezvous, and waits half an hour for workers that save
        if here.nodes == 1:
            return under_ft_launcher(words, "--standalone", *options)
        address, port = first_node(here)
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}"]
        return under_ft_launcher(words, f"--nnodes={here.nodes}", *meeting, *options)
    # Slurm stops the workers itself; torchrun must not kill them while they save (`run_command`).
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    if here.nodes == 1:
        return under_torchrun(words, "--standalone", *options)
    address, port = first_node(here)
    nodes = [f"--nnodes={here.nodes}", f"--node-rank={here.node}"]
    return under_torchrun(words, *nodes, f"--master-addr={address}", f"--master-port={port}", *options)


def run_node(file: Path) -> int:
    """Do this node's part of the job that `file`, a launch.json, describes; return the exit code."""
    launch = read_launch(file)
    here = place()
    bundle = file.absolute().parent
    job_dir = Path(os.environ.get(JOB_DIR, bundle.parent))
    try:
        job_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"set {OUTPUT_ROOT}, where you submit, to a folder that the cluster has"
        raise UserError(f"{job_dir}: the job's folder cannot be made: {error.strerror}", hint) from None
    workdir = None if launch.workdir is None else bundle / launch.workdir
    if workdir is not None and workdir == Path(launch.workdir or "") and not workdir.is_dir():
        workdir = None  # in a container, or not shared after all: the script starts in the bundle
    if launch.launch == "direct" and here.node > 0:
        return DONE
    try:
        command, environment = node_command(launch, bundle, here), local_environment({})
        if launch.launch == "ray":
            from nemo_runspec.execution.ray.allocation import run_in_allocation

            code = run_in_allocation(command, environment, workdir, here)
        else:
            left = job_dir / f".exit-code-{here.attempt}"
            code = run_command(command, environment, workdir, left, all_are_signalled=here.attempt != str(os.getpid()))
    except Exception as error:
        _leave(error.exit_code if isinstance(error, RunspecError) else FAILED, job_dir, here)
        raise
    return leave_together(code, job_dir, here)


def leave_together(code: int, job_dir: Path, here: Place) -> int:
    """Wait for the first node where that matters, and return the exit code that all nodes should have.

    Args:
        code: of the part of this node.
        job_dir: shared by the nodes; each leaves `.node-…` there.
    """
    if here.nodes == 1:
        return code
    # Slurm kills the other nodes after the first bad exit; what it does to us must not change the exit code.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if here.node == 0:
        if code == PREEMPTED:  # because another node failed or refused, perhaps: not a reason to start again
            others = {code_in(_node_file(job_dir, here, node)) for node in range(1, here.nodes)}
            code = REFUSED if REFUSED in others else FAILED if FAILED in others else code
        _leave(code, job_dir, here)
        return code
    _leave(code, job_dir, here)
    if code == DONE:
        return code  # srun waits for the others
    deadline = time.monotonic() + (WAIT_FOR_RANK_0 if code in (PREEMPTED, INTERRUPTED) else WAIT_AFTER_FAILURE)
    while time.monotonic() < deadline:
        first = code_in(_node_file(job_dir, here, 0))
        if first is not None:
            return first or code
        time.sleep(0.2)
    return code


def _node_file(job_dir: Path, here: Place, node: int) -> Path:
    return job_dir / f".node-{here.attempt}-{node}"


def _leave(code: int, job_dir: Path, here: Place) -> None:
    """Tell the other nodes, if any, with which exit code this one leaves; on a full disk they are not told."""
    if here.nodes > 1:
        with contextlib.suppress(OSError):
            write_in_one_step(_node_file(job_dir, here, here.node), str(code))


def main() -> int:
    """The command line: the path of launch.json."""
    if len(sys.argv) != 2:
        report(UserError("usage: python -m nemo_runspec.execution.node launch.json"))
        return FAILED
    return run_main(lambda: run_node(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
