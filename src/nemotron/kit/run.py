"""One run of a script: its directory, its inputs, whether it goes on from where a killed one stopped, its records.

    run = open_run(cfg, script=__file__)
    with run.phase("train"):
        run.metrics.log(step, loss=loss)
    Model(path=run.output_dir, num_steps=step).save()
    run.close()

In the run directory: `config.yaml` (resolved), `environment.json`, `code.json` (sha256 of the imported modules),
`metrics.jsonl`, `phases.jsonl` (wall time), `run.json` (state, fingerprint, inputs), `out-payload/` (what the script is
about to publish), and what the script itself puts there, such as checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nemo_runspec import errors
from nemo_runspec.artifacts import Registry, Version
from nemo_runspec.artifacts.manifest import sha256_file
from nemo_runspec.artifacts.pins import JOB_DIR
from nemo_runspec.changes import differing_keys, differing_modules, in_short
from nemo_runspec.config.yaml_text import dump_yaml, escape_interpolation, read_yaml
from nemo_runspec.errors import INTERRUPTED, PREEMPTED, RunFailed, RunspecError, UserError, first_line
from nemo_runspec.fingerprint import config_fingerprint, content_of, inputs_of, plain, run_code, run_dir_for
from nemo_runspec.publish import starts_afresh
from nemo_runspec.runspec import Runspec, parse, recipe_name
from nemo_runspec.user_files import expanded
from nemo_runspec.variables import ATTEMPT
from nemo_runspec.words import shown
from nemo_runspec.write import write_in_one_step
from nemotron.kit.environment import describe_environment
from nemotron.kit.lineage import use_configured_tracker, warn, write_json
from nemotron.kit.metrics import MetricsLog, append_line, close_mirrors, read_metrics
from nemotron.kit.producer import Producer, producer_of

LOCK_FILE = "run.lock"
STATE_FILE = "run.json"
CONFIG_FILE = "config.yaml"
CODE_FILE = "code.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
PHASES_FILE = "phases.jsonl"
PUBLISHED_FILE = "published.jsonl"
# What the launcher wrote before the script started, and the lock; a fresh start keeps them.
_KEPT = ("job.yaml", "train.yaml", "train.json", LOCK_FILE)
_RANK_0_SECONDS = 1800.0  # how long other ranks wait until rank 0 has checked the inputs

_current: Run | None = None


def current_run() -> Run | None:
    """The run that `open_run` opened in this process and that is not closed yet."""
    return _current


class Run:
    """An open run. Made by `open_run`; the attributes are for reading.

    `name`: what it is a run of, as in `nano3/sft`. `dir`: the run directory. `inputs`: role -> verified version.
    `resumed`: a run of the same fingerprint was stopped here, so its checkpoints are to be used. `output_dir`: a folder
    to fill and publish, empty unless resumed.
    `code`: sha256 of the modules that the script imports, by name.
    `metrics`: the log (rank 0's; other ranks have one of their own). `rank`: torchrun's RANK, 0 without it.
    """

    def __init__(
        self, spec: Runspec, config: dict[str, Any], directory: Path, fingerprint: str, code: dict[str, str]
    ) -> None:
        self.spec = spec
        self.code = code
        self.name = recipe_name(config["run"], spec)
        self.config = config
        self.dir = directory
        self.registry = Registry.default()
        self.rank = int(os.environ.get("RANK", "0"))
        self.fingerprint = fingerprint
        self.inputs: dict[str, Version] = {}
        self.resumed = False
        self.output_dir = directory / "out-payload"
        self._logs: list[MetricsLog] = []
        self.metrics = self.open_log("metrics")
        self._lock_descriptor: int | None = None
        self._state: dict[str, Any] = {}

    def open_log(self, name: str) -> MetricsLog:
        """`NAME.jsonl` in the directory; of another rank than 0, `NAME.rank1.jsonl` and so on. `close` closes it."""
        self._logs.append(MetricsLog(self.dir / (f"{name}.rank{self.rank}.jsonl" if self.rank else f"{name}.jsonl")))
        return self._logs[-1]

    def artifact_name(self, results: bool = False) -> str | None:
        """The name that the config gives to what this run publishes: `run.results` for Results, else `run.output`."""
        settings = self.config["run"]
        name = settings.get("results") or settings.get("output") if results else settings.get("output")
        return str(name) if name else None

    def has_noted(self, version: Version) -> bool:
        """Whether this run, or an attempt before it, has noted that it published this version."""
        return any(line["version"] == version.ref for line in read_metrics(self.dir / PUBLISHED_FILE))

    def note_published(self, version: Version) -> None:
        """Remember what this run published, once."""
        if not self.has_noted(version):
            line = {"name": version.name, "version": version.ref, "digest": version.digest}
            append_line(self.dir / PUBLISHED_FILE, line)

    def producer(self) -> Producer:
        """The producer part of a record. A launched script has the launcher's command line, from its `job.yaml`."""
        argv, config = None, self.config_file()
        if config is not None:
            job = config.parent / "job.yaml"
            argv = (read_yaml(job.read_text(encoding="utf-8"), shown(job))[0] or {}).get("argv")
        producer = producer_of(self.spec.script_path, name=self.name, fingerprint=self.fingerprint, argv=argv)
        return producer.model_copy(update={"run": self._state["id"]})

    def config_file(self) -> Path | None:
        """The config that a launcher wrote for this job beside a `job.yaml`; None for a script started by hand.

        It lies in the run's directory, or, on a cluster, beside the code that was sent there.
        """
        for word in sys.argv[1:]:
            path = Path(word.removeprefix("--config=")).absolute()
            if path.name == self.spec.job_config_name and (path.parent / "job.yaml").is_file():
                sent = JOB_DIR in os.environ and (path.parent / "launch.json").is_file()
                if sent or path.parent == self.dir:
                    return path
        return None

    def add_input(self, version: Version, role: str | None = None) -> None:
        """Note that this run reads `version`, after checking every byte of it; a known one is not read again."""
        if not any(known.directory == version.directory for known in self.inputs.values()):
            version.registry.resolve_verified(version.ref)
            add_input(self.inputs, version, role)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that it begins, and record the wall time of what happens inside, also when it ends in an error."""
        if self.rank == 0:
            print(f"{self.name}: {name}", file=sys.stderr, flush=True)
        started = time.time()
        clock = time.perf_counter()
        try:
            yield
        finally:
            if self.rank == 0:
                seconds = round(time.perf_counter() - clock, 3)
                line = {"phase": name, "started_at": round(started, 3), "seconds": seconds}
                append_line(self.dir / PHASES_FILE, line)

    def close(self, *, finished: bool = True) -> None:
        """Close the records. `finished` False leaves the run to be resumed by the same command."""
        global _current
        for log in self._logs:
            log.close()
        if self.rank == 0 and finished:
            self.write_state("finished")
        close_mirrors([mirror for log in self._logs for mirror in log.mirrors], finished)
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
        if _current is self:
            _current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        finished = error is None or (isinstance(error, SystemExit) and not error.code)
        if error is not None and not finished and self.rank == 0:
            code = error.exit_code if isinstance(error, RunspecError) else getattr(error, "code", None)
            left = isinstance(error, KeyboardInterrupt) or code in (INTERRUPTED, PREEMPTED)
            why = first_line(error)
            with contextlib.suppress(OSError):  # a full disk may be what ended it
                self.write_state("running", ended="stopped" if left else "failed", why=why)
        self.close(finished=finished)

    def lock(self) -> None:
        """Keep other processes out of the directory for as long as this one lives.

        A record lock: the kernel drops it when the process dies, and forked data loader workers do not inherit it.
        Raises UserError when another process holds it. A file system without locks is used without.
        """
        path = self.dir / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(descriptor, 32).decode(errors="replace").strip()
                os.close(descriptor)
                raise UserError(
                    f"process {holder or 'unknown'} is running the same thing in {self.dir}",
                    "wait for it, or stop it; the same command then resumes",
                ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock_descriptor = descriptor

    def write_state(self, state: str, **more: Any) -> None:
        """Write `run.json` in one step: the state (`running`, `finished`), and whatever else is to be known.

        `running` is every run that has not finished, and that the same command therefore resumes; one that ended in an
        error or on a signal has `ended`: `failed` or `stopped`.
        """
        self._state |= {"state": state, **more}
        write_in_one_step(self.dir / STATE_FILE, json.dumps(self._state, indent=2))


def add_input(inputs: dict[str, Version], version: Version, role: str | None) -> None:
    """Add a version, unless it is there, under its role, else its name; `name:3` where another one has that."""
    if not any(known.directory == version.directory for known in inputs.values()):
        key = role or version.name
        inputs[key if key not in inputs else version.ref] = version


def open_run(cfg: Any, script: str | Path) -> Run:
    """Open the run of `script` with the config that `load_script_config` returned, and make it the current one.

    The directory follows from config, script and inputs. Where a run of the same fingerprint was stopped, this one
    resumes it, unless the command said `--force`; where it had finished, it starts afresh. A config with
    `resume: PATH` names the directory itself. Saves are tracked in W&B where env.toml has a table [tool.wandb].

    Raises UserError: an input is missing or has a flipped byte, another process is running there, `resume` names a run
    of another config.
    """
    global _current
    if _current is not None:
        raise RuntimeError(f"a run is open already: {_current.dir}")
    spec = parse(script)
    config = plain(cfg)
    resume = config.pop("resume", None)  # where to go on, not what to compute
    inputs = inputs_of(config)
    fingerprint, code = config_fingerprint(cfg, spec, inputs), run_code(cfg, spec)
    directory = run_dir_for(config, spec, fingerprint)
    if resume:
        directory = _resume_dir(Path(resume), cfg, fingerprint, code)
    run = Run(spec, config, directory, fingerprint, code)
    if run.rank == 0:
        for role, version in inputs.items():
            run.add_input(version, role)
        if names := {name for name in (run.artifact_name(), run.artifact_name(results=True)) if name}:
            run.registry.check_writable(names)
        use_configured_tracker()
        _take_over(run, resume=bool(resume))
        write_json(directory / ENVIRONMENT_FILE, describe_environment())
        write_json(directory / CODE_FILE, code)
        (directory / CONFIG_FILE).write_text(dump_yaml(config, escape=True), encoding="utf-8")
        _keep_bundle_files(run)
    else:
        for role, version in inputs.items():
            _bring(version)
            run.inputs[role] = version
        run.resumed = _wait_for_rank_0(directory)
    _fetch_paths(config, run)
    errors.work_began = True
    _current = run
    return run


def _bring(version: Version) -> None:
    """Other ranks: an input of a registry behind a URL has to be on this node too; its first rank reads every byte."""
    if version.registry.is_remote and os.environ.get("LOCAL_RANK", "0") == "0":
        version.registry.resolve_verified(version.ref)
    else:
        version.fetch()


def _fetch_paths(value: Any, run: Run) -> None:
    """Fetch what a config names by path in yet another payload than those of its inputs (`${art:model,dataset_path}`).

    An artifact that has been deleted since is left to whoever opens the path.
    """
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _fetch_paths(item, run)
    elif run.registry.is_remote and isinstance(value, str) and Path(value).is_relative_to(run.registry.local_root):
        path = Path(value)
        if not any(path.is_relative_to(version.directory) for version in run.inputs.values()):
            with contextlib.suppress(UserError):
                version = run.registry.version_at(path)
                # Its record, beside the payload, comes with the payload.
                inside = path.relative_to(version.path).as_posix() if path.is_relative_to(version.path) else "."
                version.fetch("" if inside == "." else inside)


def _keep_bundle_files(run: Run) -> None:
    """Rank 0 of a job on a cluster: keep `job.yaml` and the config that came with the code, as a local launch does."""
    config = run.config_file()
    if config is not None and config.parent != run.dir:
        for name in ("job.yaml", config.name):
            shutil.copyfile(config.parent / name, run.dir / name)


def read_state(directory: Path) -> dict[str, Any]:
    """`run.json` of a run directory; empty when there is none or it cannot be read."""
    return read_json(directory / STATE_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def _take_over(run: Run, *, resume: bool) -> None:
    """Rank 0: lock the directory, decide whether this resumes, clear what a fresh start must not find."""
    run.dir.mkdir(parents=True, exist_ok=True)
    run.lock()
    before = read_state(run.dir)
    run.resumed = resume or (before.get("state") == "running" and not starts_afresh())
    if not run.resumed and (run.dir / STATE_FILE).exists():
        # Empty until all else is gone: what a kill leaves meanwhile is neither resumed nor taken for a new run's own.
        os.truncate(run.dir / STATE_FILE, 0)
        for entry in run.dir.iterdir():
            if entry.name in (*_KEPT, STATE_FILE) or entry.suffix == ".log":
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if not run.resumed:
        _mention_stopped_run(run)
    run.output_dir.mkdir(exist_ok=True)
    run.write_state(
        "running",
        id=before["id"] if run.resumed and "id" in before else secrets.token_hex(8),
        fingerprint=run.fingerprint,
        name=run.name,
        resumed=run.resumed,
        attempts=before.get("attempts", 0) + 1 if run.resumed else 1,
        started_at=round(time.time(), 3),
        inputs={role: version.pinned for role, version in run.inputs.items()},
        script_sha256=sha256_file(run.spec.script_path),
        launch=_launch(),
    )


def _mention_stopped_run(run: Run) -> None:
    """Say where an unfinished run of the same config is that this one does not go on with, as its code is another."""
    name = run.dir.name.rpartition("-")[0]
    for folder in sorted(run.dir.parent.glob(f"{name}-*")):
        if folder == run.dir or read_state(folder).get("state") != "running":
            continue
        config = folder / CONFIG_FILE
        if not config.is_file() or config.read_text(encoding="utf-8") != dump_yaml(run.config, escape=True):
            continue
        what = in_short(differing_modules(read_json(folder / CODE_FILE), run.code)) or "the script"
        warn(f"starting afresh: {folder} has an unfinished run of this config, of other code ({what})")
        return


def _wait_for_rank_0(directory: Path) -> bool:
    """Other ranks: wait until rank 0 of this very launch has opened the directory; return whether it resumes."""
    deadline = time.monotonic() + _RANK_0_SECONDS
    while time.monotonic() < deadline:
        state = read_state(directory)
        if state.get("launch") == _launch() and state.get("state") == "running":
            return bool(state["resumed"])
        time.sleep(0.05)
    raise RunFailed(f"rank 0 did not open {directory} within {_RANK_0_SECONDS:.0f} s")


def _launch() -> str:
    """What all ranks of one launch share, and no other launch has: the launcher's process, or the cluster's job."""
    torchrun = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    parts = [os.environ.get(name, "") for name in (*torchrun, ATTEMPT, "SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # one node: one launcher process
        parts.append(str(os.getppid()))
    return "/".join(parts)


def _resume_dir(directory: Path, cfg: Any, fingerprint: str, code: dict[str, str]) -> Path:
    """Check that the run in `directory` is one of this config, code and inputs; say what differs if it is not."""
    directory = expanded(directory).absolute()
    state = read_state(directory)
    if not state:
        raise UserError(f"resume={directory}: no run there", f"a run directory holds a {STATE_FILE}")
    if state.get("fingerprint") == fingerprint:
        return directory
    path = directory / CONFIG_FILE
    then = read_yaml(path.read_text(encoding="utf-8"), shown(path))[0] if path.exists() else {}
    changes = differing_keys(content_of(cfg, then or {}), escape_interpolation(content_of(cfg)))
    changes += differing_modules(read_json(directory / CODE_FILE), code)
    raise UserError(
        f"resume={directory}: that run has fingerprint {state.get('fingerprint')}, this one {fingerprint}",
        f"different here: {in_short(changes, 5) or 'the script, or the content of an input'}",
    )
