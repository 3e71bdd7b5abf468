"""Jobs submitted to Slurm on this machine that have not started: what their folders say that they are going to read."""

from __future__ import annotations

from pathlib import Path

from nemo_runspec.config.yaml_text import read_yaml
from nemo_runspec.env.file import load_tables, profiles_of
from nemo_runspec.env.roots import located_path, output_root
from nemo_runspec.errors import UserError


def inputs_of_waiting_jobs() -> dict[str, Path]:
    """The versions, as `name:version`, that jobs are pinned to which have no log yet, each with the folder of a job.

    Slurm is not asked: a job that was cancelled before it started counts until its folder is removed. Looked at are the
    job folders of this output root and of the profiles in env.toml.

    Raises:
        UserError: a job.yaml cannot be read.
    """
    inputs: dict[str, Path] = {}
    for file in (path for job_dir in _job_dirs() for path in job_dir.glob("experiments/*/*/*/code/job.yaml")):
        folder = file.parents[1]
        if not any(folder.glob("log-*")):
            record = read_yaml(file.read_text(encoding="utf-8"), str(file))[0]
            if not isinstance(record, dict):  # it is being copied, or was cut off
                raise UserError(f"{file}: not the record of a job", f"of a job that was cancelled, remove {folder}")
            pinned = (record.get("inputs") or {}).values()
            inputs |= {str(ref).partition("@")[0]: folder for ref in pinned if ref is not None}
    return inputs


def _job_dirs() -> set[Path]:
    file, toml = load_tables()
    named = [table["job_dir"] for table in profiles_of(toml).values() if "job_dir" in table]
    return {output_root() / "jobs", *(located_path(file, job_dir) for job_dir in named)}
