"""Submit to Slurm through NeMo-Run: the pieces that a command file puts together.

    run = load_nemo_run(env)
    with open_experiment(name, env, dry_run=cfg.dry_run) as experiment:
        executor = create_executor(env, bundle, name)
        experiment.add(run.Script(path="launch.sh", entrypoint="bash"), executor=executor, name=name)
        if cfg.dry_run:
            print(submission_text(experiment, env))
            return 0
        experiment.run(detach=True)
    return follow_or_leave(experiment, env, attached=cfg.attached)

NeMo-Run writes the batch script and calls sbatch, here or over SSH. A job's folder is
`JOB_DIR/experiments/TITLE/TITLE_ID/NAME`, with the bundle in `code/` and a log for each attempt.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.errors import FAILED, PREEMPTED, REFUSED, RunspecError, UserError
from nemo_runspec.execution.interrupts import say
from nemo_runspec.execution.launch_script import SCRIPT_NAME
from nemo_runspec.execution.slurm.remote import Shell, shell_for
from nemo_runspec.installation import install_line
from nemo_runspec.packaging import contents
from nemo_runspec.profile import Env, SlurmSettings

if TYPE_CHECKING:
    from nemo_run import Experiment, SlurmExecutor

NEMO_RUN = "nemo_run"
# NeMo-Run leaves paths unquoted in the shell commands that it makes.
_SAFE_PATH = re.compile(r"[\w@%+=:,./~-]+")


@dataclass(frozen=True)
class SlurmJob:
    """A submitted job. `folder` is its folder, `max_restarts` how often it is requeued; `shell` reaches its cluster."""

    id: str
    name: str
    folder: str
    max_restarts: int
    shell: Shell

    def log(self, attempt: int = 0) -> str:
        """Path of the log of an attempt: what the script printed on all nodes."""
        return f"{self.folder}/log-{self.name}_{self.id}_{attempt}.out"

    @property
    def batch_log(self) -> str:
        """Path of the log of the batch script itself, with what srun and Slurm say."""
        return f"{self.folder}/sbatch_{self.name}_{self.id}.out"


def load_nemo_run(env: Env) -> Any:
    """The module `nemo_run`, told to keep its files below the job folder of the profile, and to be quiet.

    Raises:
        UserError: it is not installed, or does not import.
    """
    _slurm(env)
    install = install_line("launch")
    if importlib.util.find_spec(NEMO_RUN) is None:
        raise UserError(f"profile {env.profile}: executor slurm needs NeMo-Run, which is not installed", install)
    home, before = str(_staging(env)), os.environ.get("NEMORUN_HOME")
    os.environ["NEMORUN_HOME"] = home
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(NEMO_RUN)
            importlib.import_module("nemo_run.config").set_nemorun_home(home)
    except ImportError as error:
        raise UserError(f"NeMo-Run does not import: {error}", install) from None
    finally:
        # The job inherits this environment.
        del os.environ["NEMORUN_HOME"]
        if before is not None:
            os.environ["NEMORUN_HOME"] = before
    logging.getLogger("torchx").setLevel(logging.CRITICAL)
    return module


def create_executor(env: Env, bundle: Path, name: str) -> SlurmExecutor:
    """The SlurmExecutor for a job of this profile.

    Args:
        bundle: the folder that holds `launch.sh` and all that it needs.
        name: of the job; its name in Slurm, and in `experiment.add(name=…)`.

    Raises:
        UserError: NeMo-Run is not installed, or the path of the job folder has characters that it cannot handle.
    """
    run = load_nemo_run(env)
    from nemo_runspec.execution.slurm.nemo_run_parts import BundlePackager, LocalTunnel, SSHTunnel

    slurm = _slurm(env)
    check_job_dir(env)
    experiments = f"{slurm.job_dir}/experiments"
    tunnel: Any = LocalTunnel(job_dir=experiments)
    if slurm.ssh is not None:
        login = {key: value for key, value in vars(slurm.ssh).items() if value is not None}
        tunnel = SSHTunnel(job_dir=experiments, secrets=list(env.secrets), **login)
    executor: SlurmExecutor = run.SlurmExecutor(
        account=slurm.account,
        job_name_prefix="runspec.",  # without one NeMo-Run makes it of the account, which there may not be
        partition=slurm.partition,
        nodes=slurm.nodes,
        ntasks_per_node=1,
        gpus_per_node=slurm.gpus_per_node or None,
        cpus_per_task=slurm.cpus_per_task,
        mem=slurm.mem,
        exclusive=slurm.exclusive or None,
        time=slurm.time,
        qos=slurm.qos,
        constraint=slurm.constraint,
        signal=slurm.signal,
        container_image=slurm.container_image,
        container_mounts=container_mounts(env),
        container_env=container_env(env),
        srun_args=srun_args(slurm),
        additional_parameters={"kill_on_invalid_dep": "yes"},
        setup_lines=setup_lines_of(env),
        tunnel=tunnel,
        packager=BundlePackager(bundle=str(bundle)),
        poll_estimated_start_time=False,
    )
    executor.job_details.job_name = name
    return executor


def check_job_dir(env: Env) -> None:
    """Refuse a job folder that NeMo-Run cannot quote, or would not leave as it is."""
    job_dir = f"{_slurm(env).job_dir}"
    if not _SAFE_PATH.fullmatch(job_dir):
        at = f"job_dir = {job_dir!r}: NeMo-Run cannot work with a blank or a quote in this path"
        raise UserError(at, f"give profile {env.profile} a job_dir without")
    # Without a container it puts the job's folder in the place of this word, wherever in the batch script that stands.
    if "/nemo_run" in job_dir and not _slurm(env).container_image:
        at = f"job_dir = {job_dir!r}: NeMo-Run has a use of its own for /nemo_run, and would write to another folder"
        raise UserError(at, f"give profile {env.profile} a job_dir without")


def note_missing_sbatch(env: Env) -> None:
    """Say in a dry run that nothing can be submitted from this machine, where that is so."""
    if _slurm(env).ssh is None and shutil.which("sbatch") is None:
        say('no program sbatch here: submit on a login node, or through one (tunnel = "ssh" in the profile)')


def srun_args(slurm: SlurmSettings) -> list[str]:
    """Options of srun, which starts one task a node; that starts the processes."""
    words = ["--wait=0"]  # the first node to be done does not end the others
    if slurm.cpus_per_task is not None:
        words.append(f"--cpus-per-task={slurm.cpus_per_task}")  # which srun no longer takes over from sbatch
    return words


def container_mounts(env: Env) -> list[str]:
    """The folders that a container of the job sees, as `there:in the container`."""
    slurm = _slurm(env)
    shared = _shared_folders(env) if slurm.container_image else []
    return [*(f"{folder}:{folder}" for folder in shared), *slurm.mounts]


def container_env(env: Env) -> list[str]:
    """The variables of the batch script that go before those of the image."""
    return [*env.secrets, "MASTER_ADDR", "MASTER_PORT"]


def setup_lines_of(env: Env) -> str:
    """`setup_lines` for a job of this profile."""
    slurm = _slurm(env)
    return setup_lines(slurm.max_restarts, _shared_folders(env) if slurm.container_image else None)


def setup_lines(max_restarts: int, folders: list[str] | None = None) -> str:
    """What the batch script does before srun.

    Args:
        max_restarts: how often a job that has saved its checkpoint (exit code 143) is requeued.
        folders: made, if they are not there, since a container cannot mount what does not exist.
    """
    lines = [
        "# Lines that several nodes print at the same time stay whole.",
        "unset SLURM_UNBUFFEREDIO",
        "# Where rank 0 is. An address of the loopback says nothing on other nodes; the name of the node may.",
        "export MASTER_ADDR=${head_node_ip%% *}",
        'case "$MASTER_ADDR" in',
        '  "" | 127.*) getent hosts "$head_node" > /dev/null && export MASTER_ADDR=$head_node ;;',
        "esac",
        "# The first port from there on that nobody uses; this script runs on the head node.",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "in_use() {",
        '  grep -qs "^ *[0-9]*: [0-9A-F]*:$(printf %04X "$MASTER_PORT") " /proc/net/tcp /proc/net/tcp6',
        "}",
        "while in_use; do MASTER_PORT=$((MASTER_PORT + 1)); done",
        "# Started again only by the lines below, not by Slurm itself: who follows the job is told of a failed node.",
        "scontrol update JobId=$SLURM_JOB_ID Requeue=0",
    ]
    if folders:
        lines.append(f"mkdir -p {shlex.join(folders)}")
    lines += [
        "requeue_after_checkpoint() {",
        "  code=$?",
        f"  [ $code -eq {PREEMPTED} ] || return $code",
        '  job=$(scontrol show job -o "$SLURM_JOB_ID" || true)',
        "  # Exit codes that several nodes left: where one failed the others are stopped, some before they know why.",
        "  folder=$(echo \"$job\" | sed -n 's|.* StdOut=\\([^ ]*\\)/.*|\\1|p')",
        '  left="$folder/.node-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        f'  if ! grep -qsx {PREEMPTED} "$left"-*-0; then',
        f'    failed=$(grep -hsx "[{FAILED}{REFUSED}]" "$left"-* | sort | tail -n 1)',
        '    [ -z "$failed" ] || exit $failed',
        "  fi",
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ] &&',
        '    echo "$job" | grep -q " JobState=RUNNING "; then',
        "    scontrol update JobId=$SLURM_JOB_ID Requeue=1 && scontrol requeue $SLURM_JOB_ID",
        "  fi",
        "}",
        "trap requeue_after_checkpoint EXIT",
    ]
    return "\n" + "\n".join(lines) + "\n"


@contextlib.contextmanager
def open_experiment(name: str, env: Env, *, dry_run: bool = False) -> Iterator[Experiment]:
    """A new experiment of NeMo-Run, which prints nothing and, where submitting fails, leaves nothing behind."""
    if dry_run:
        note_missing_sbatch(env)
    with load_nemo_run(env).Experiment(
        name,
        base_dir=str(_scratch() if dry_run else _staging(env)),
        log_level="ERROR",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    ) as experiment:
        try:
            with _kept_from_nemo_run():
                yield experiment
        except BaseException:
            _take_back(experiment)
            raise


def _take_back(experiment: Experiment) -> None:
    """Cancel what was submitted already, and remove the folders."""
    for job in experiment.jobs:
        tunnel = job.executor.tunnel
        with contextlib.suppress(RunspecError):
            if job.handle:
                tunnel.run(f"scancel {_job_id(job.handle)}", warn=True)
            if tunnel.key != "@localhost" and getattr(tunnel, "session", None):
                folder_there = tunnel.job_dir
                title, experiments = Path(folder_there).parent, Path(folder_there).parent.parent
                tunnel.run(f"rm -rf {folder_there}; rmdir {title} {experiments}", warn=True)
    folder = Path(experiment._exp_dir)
    shutil.rmtree(folder, ignore_errors=True)
    for parent in list(folder.parents)[:2]:
        with contextlib.suppress(OSError):  # other experiments are in it
            parent.rmdir()


@contextlib.contextmanager
def _kept_from_nemo_run() -> Iterator[None]:
    """NeMo-Run reads this process's stdin, and puts the source of the main program beside the job, or fails where there
    is none (`python -c`). Inside, stdin is empty and the main program a module without source."""
    main, stdin = sys.modules["__main__"], sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.modules["__main__"], sys.stdin = sys, nothing
        try:
            yield
        finally:
            sys.modules["__main__"], sys.stdin = main, stdin


def submission_text(experiment: Experiment, env: Env) -> str:
    """All that `experiment.run` would submit, as text; nothing is left on disk, and no connection is made.

    An id that does not exist yet stands there as `<id>`.
    """
    with _kept_from_nemo_run():
        experiment.dryrun(log=False, delete_exp_dir=False)
    folder = Path(experiment._exp_dir)
    parts = []
    for job in experiment.jobs:
        script = (folder / f"{job.id}_sbatch.sh").read_text(encoding="utf-8").strip()
        bundle = Path(job.executor.job_dir) / "code"
        parts += travels(
            env, job.id, job.executor.tunnel.job_dir, job.dependencies, f"# {job.id}_sbatch.sh\n{script}\n", bundle
        )
    shutil.rmtree(folder)
    return "\n".join(parts).replace(experiment._id, f"{experiment._title}_<id>").rstrip()


def travels(
    env: Env, name: str, folder: str, dependencies: Sequence[str], batch_script: str, bundle: Path
) -> list[str]:
    """The parts of a dry run's text about one job: its submission, `batch_script`, launch.sh, and what is copied.

    Args:
        folder: of the experiment, on the cluster.
        dependencies: names of the jobs that it waits for.
    """
    slurm = _slurm(env)
    words = ["sbatch", "--requeue", "--parsable"]
    if dependencies:
        words.append(f"--dependency=afterok:{':'.join(f'<id of {other}>' for other in dependencies)}")
    command = " ".join([*words, f"{folder}/{name}_sbatch.sh"])
    host = "" if slurm.ssh is None else f"{slurm.ssh.host}:"
    return [
        f"# {name}: submitted{f' over ssh, on {host[:-1]},' if host else ''} with\n{command}\n",
        batch_script,
        f"# {SCRIPT_NAME}, run on each node\n{(bundle / SCRIPT_NAME).read_text(encoding='utf-8').strip()}\n",
        f"# what travels, to {host}{folder}/{name}/code\n" + "\n".join(contents(bundle)) + "\n",
    ]


def submitted_jobs(experiment: Experiment, env: Env) -> list[SlurmJob]:
    """The jobs of an experiment that has been run, in the order in which they were added."""
    slurm = _slurm(env)
    shell = shell_for(slurm.ssh)
    return [
        SlurmJob(_job_id(job.handle), job.id, f"{job.executor.tunnel.job_dir}/{job.id}", slurm.max_restarts, shell)
        for job in experiment.jobs
    ]


def how_to_follow(jobs: Sequence[SlurmJob]) -> str:
    """What `--batch` prints: job ids, logs, and Slurm's own commands."""
    lines = []
    for job in jobs:
        prefix = f"{job.shell.prefix} " if job.shell.prefix else ""
        log = shlex.quote(job.log()) if not prefix else job.log()
        lines += [
            f"{job.name}: job {job.id}",
            f"  log      {job.log()}",
            f"  follow   {prefix}tail -F {log}",
            f"  inspect  {prefix}sacct -j {job.id} --format=JobID,State,ExitCode,Elapsed,NodeList",
            f"  cancel   {prefix}scancel {job.id}",
        ]
    return "\n".join(lines)


def _slurm(env: Env) -> SlurmSettings:
    if env.slurm is None:
        raise UserError(f"profile {env.profile}: executor {env.executor}: this command submits to Slurm only")
    return env.slurm


def _staging(env: Env) -> Path:
    """Where NeMo-Run puts an experiment together: in place, or in a scratch folder that is copied over SSH."""
    slurm = _slurm(env)
    return Path(f"{slurm.job_dir}") if slurm.ssh is None else _scratch()


@functools.cache
def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="runspec-submit-")


def _scratch() -> Path:
    return Path(_scratch_folder().name)


def _shared_folders(env: Env) -> list[str]:
    """Folders that the job works in, outermost ones only."""
    named = [env.output, _slurm(env).job_dir, env.artifacts, None if env.cache_dir is None else str(env.cache_dir)]
    folders = sorted({folder.rstrip("/") for folder in named if folder and folder.startswith("/")})
    return [folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders)]


def _job_id(handle: str) -> str:
    """The Slurm job id of a torchx handle, `slurm_tunnel://nemo_run/ID/…`."""
    return handle.partition("://")[2].split("/")[1].partition(";")[0]
