"""Slurm through NeMo-Run: submit, stay attached, behind SSH. The names here are the pieces of a command file."""

from nemo_runspec.execution.slurm.following import follow_or_leave
from nemo_runspec.execution.slurm.preview import nemo_run_is_installed, preview_text
from nemo_runspec.execution.slurm.submit import create_executor, load_nemo_run, open_experiment, submission_text

__all__ = [
    "create_executor",
    "follow_or_leave",
    "load_nemo_run",
    "nemo_run_is_installed",
    "open_experiment",
    "preview_text",
    "submission_text",
]
