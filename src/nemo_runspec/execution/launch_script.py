"""The two files of a bundle that say how a job is started on a node: `launch.sh` and `launch.json`.

Every node of a job runs `bash launch.sh` in the unpacked bundle. It sets the variables of the job, runs the profile's
startup commands, and becomes `python -m nemo_runspec.execution.node launch.json`, which starts the script.

Values of secrets are in neither file: `launch.sh` only checks that the names are set, and refuses otherwise.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from nemo_runspec.errors import REFUSED, UserError
from nemo_runspec.runspec import DEFAULT_CMD, LAUNCHERS
from nemo_runspec.variables import (
    ATTEMPT,
    CPUS_PER_NODE,
    ENV_FILE,
    JOB_DIR,
    NODE_RANK,
    NUM_NODES,
    OF_ONE_JOB,
    OF_ONE_NODE,
)

SCRIPT_NAME, JSON_NAME = "launch.sh", "launch.json"
_SCHEMA = 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The others of several nodes are stopped because of this one; what it leaves says that they have not saved.
_REFUSE = f"""\
refuse_job() {{
    echo "error: $1" >&2
    [ "${{{NUM_NODES}:-1}}" = 1 ] || echo {REFUSED} > "${JOB_DIR}/.node-${ATTEMPT}-${NODE_RANK}" || true
    exit {REFUSED}
}}"""
# Slurm's names are set in each task of srun; a batch script, or a Ray that srun started, has left-over ones.
_NODE_OF_SLURM = f"""\
if [ -n "${{SLURM_STEP_ID:-}}" ]; then
    export {NODE_RANK}="$SLURM_NODEID" {NUM_NODES}="$SLURM_STEP_NUM_NODES"
    export {ATTEMPT}="$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$SLURM_STEP_ID"
    export {CPUS_PER_NODE}="${{SLURM_CPUS_ON_NODE:-}}"
fi"""


@dataclass(frozen=True)
class Launch:
    """What `launch.json` holds. Paths are relative to the bundle.

    `launch`, `cmd`: as in the runspec. `processes_per_node`: worker processes that torchrun, or the
    `launcher` in its place, starts on each node.
    `workdir`: where the script starts, None for the bundle; an absolute one that a node does not have is passed over.
    """

    name: str
    launch: str
    script: str
    config: str
    cmd: str = DEFAULT_CMD
    workdir: str | None = None
    processes_per_node: int = 1
    launcher: str = "torchrun"
    launcher_options: list[str] = field(default_factory=list)


def launch_json(launch: Launch) -> str:
    """The text of `launch.json`."""
    return json.dumps({"schema": _SCHEMA, **asdict(launch)}, indent=2) + "\n"


def read_launch(path: Path) -> Launch:
    """Read `launch.json`.

    Raises:
        UserError: it is not there, or not such a file (of another version, perhaps).
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != _SCHEMA or data["launch"] not in LAUNCHERS:
            raise ValueError
        return Launch(**data)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        known = ", ".join(each.name for each in fields(Launch))
        raise UserError(f"{path}: not a launch file of this version", f"keys: schema ({_SCHEMA}), {known}") from None


def launch_script(
    variables: Mapping[str, str],
    *,
    python_path: Sequence[str],
    startup_commands: Sequence[str] = (),
    secrets: Sequence[str] = (),
    executor: str = "slurm",
) -> str:
    """The text of `launch.sh`.

    Args:
        variables: set for the job, over what it inherits; any text is a value.
        python_path: folders of the bundle that hold packages, as in `project/src`.
        startup_commands: lines of bash, of the profile; the first one that fails ends the job.
        secrets: names of variables that must be set when the job starts.
        executor: who starts the job, as in env.toml. Ray is told RUNSPEC_JOB_DIR; otherwise it is the folder above the
            bundle. Which node of how many this is comes from Slurm, or is set already by a launcher that is not known
            here; a job on a Ray cluster has one.
    """
    inherited = f"${{{JOB_DIR}:-" if executor == "ray" else ""
    for name in (*variables, *secrets):
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is not the name of an environment variable")
    lines = [
        "#!/usr/bin/env bash",
        "# Runs on every node of the job.",
        "set -euo pipefail",
        "# A request to save comes to every process of the job; until the script listens, nobody may die of it.",
        "trap '' USR1",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        # Submitted from within another job, this one is still none of its parts; env.toml stays where it was submitted.
        f"unset {' '.join((*OF_ONE_JOB, ENV_FILE))}",
        f'export {JOB_DIR}="{inherited}$(dirname "$PWD"){"}" if inherited else ""}"',
    ]
    if executor in ("slurm", "ray"):
        lines.append(f"unset {' '.join(OF_ONE_NODE)}")
    if executor == "slurm":
        lines.append(_NODE_OF_SLURM)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if startup_commands or secrets:
        lines += ["", _REFUSE]
    if startup_commands:
        lines += [
            "",
            "# startup_commands of the profile; those of others are seldom written for -u",
            'launch_folder="$PWD"',
            "set +u",
            # One that SIGTERM ended (128 + 15) has not failed: the job is to leave.
            "trap '[ $? -eq 143 ] || refuse_job \"a startup command failed on $(hostname): $BASH_COMMAND\"' ERR",
            *startup_commands,
            "trap - ERR",
            "set -u",
            'cd "$launch_folder"',
        ]
    # Last: a module or an environment that is activated may set this, too.
    folders = ":".join('"$PWD"/' + shlex.quote(folder) for folder in python_path)
    lines += ["", f'export PYTHONPATH={folders}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    if secrets:
        lines += [
            "",
            f"for name in {' '.join(secrets)}; do",
            '    if [ -z "${!name:-}" ]; then',
            '        refuse_job "$name, a secret of this job, is not set on $(hostname)"',
            "    fi",
            "done",
        ]
    lines += ["", f"exec python -m nemo_runspec.execution.node {JSON_NAME}"]
    return "\n".join(lines) + "\n"
