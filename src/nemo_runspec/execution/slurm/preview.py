"""What a dry run shows of a Slurm submission where NeMo-Run, which writes the batch script, is not installed.

All that follows from the profile and the script: the options of sbatch, the lines that are put into the batch script,
srun's command, launch.sh and what travels. The lines are those of `submission_text`, which shows the whole file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from nemo_runspec.execution.slurm import submit
from nemo_runspec.execution.slurm.submit import container_env, container_mounts, setup_lines_of, srun_args, travels
from nemo_runspec.installation import install_line
from nemo_runspec.profile import Env, SlurmSettings


def nemo_run_is_installed() -> bool:
    """Whether NeMo-Run is here, without importing it."""
    return importlib.util.find_spec(submit.NEMO_RUN) is not None


def preview_text(title: str, bundles: Mapping[str, Path], env: Env) -> str:
    """What would be submitted, but for the lines that NeMo-Run adds to a batch script.

    Args:
        title: of the experiment.
        bundles: name of each job -> the folder with its `launch.sh`, in the order in which they wait for each other.

    Raises:
        UserError: NeMo-Run could not work with the profile's job folder.
    """
    submit.check_job_dir(env)
    submit.note_missing_sbatch(env)
    slurm = env.slurm
    assert slurm is not None, "the profile's executor is slurm"
    folder = f"{slurm.job_dir}/experiments/{title}/{title}_<id>"
    parts = [f"# NeMo-Run is not installed here. Submitting needs it: {install_line('launch')}\n"]
    before: list[str] = []
    for name, bundle in bundles.items():
        batch_script = "\n".join(
            [
                f"# {name}_sbatch.sh, but for what NeMo-Run adds",
                *(f"#SBATCH --{option}" for option in sorted(_options(slurm, name, f"{folder}/{name}"))),
                setup_lines_of(env).rstrip(),
                "",
                _srun(env, name, f"{folder}/{name}"),
                "",
            ]
        )
        parts += travels(env, name, folder, before, batch_script, bundle)
        before = [name]
    return "\n".join(parts).rstrip()


def _options(slurm: SlurmSettings, name: str, folder: str) -> list[str]:
    stated = {
        "account": slurm.account,
        "constraint": slurm.constraint,
        "cpus-per-task": slurm.cpus_per_task,
        "gpus-per-node": slurm.gpus_per_node or None,
        "job-name": name,
        "kill-on-invalid-dep": "yes",
        "mem": slurm.mem,
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",
        "output": f"{folder}/sbatch_{name}_%j.out",
        "partition": slurm.partition,
        "qos": slurm.qos,
        "signal": slurm.signal,
        "time": slurm.time,
    }
    options = [f"{option}={value}" for option, value in stated.items() if value is not None]
    return [*options, *["exclusive"] * slurm.exclusive]


def _srun(env: Env, name: str, folder: str) -> str:
    slurm = env.slurm
    assert slurm is not None
    words = ["srun", "--output", f"{folder}/log-{name}_%j_${{SLURM_RESTART_COUNT:-0}}.out"]
    if slurm.container_image:
        mounts = ",".join([*container_mounts(env), f"{folder}:/nemo_run"])
        words += ["--container-image", slurm.container_image, "--container-mounts", mounts]
        words += ["--container-workdir", "/nemo_run/code", "--container-env", ",".join(container_env(env))]
    else:
        words += ["--chdir", f"{folder}/code"]
    return " ".join([*words, "--wait=60", "--kill-on-bad-exit=1", *srun_args(slurm), "bash", "launch.sh"])
