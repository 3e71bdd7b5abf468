"""Slurm through NeMo-Run: submit, stay attached, behind SSH. The names here are the pieces of a command file."""

from nemo_runspec.execution.slurm.following import follow_or_leave
from nemo_runspec.execution.slurm.submit import create_executor, load_nemo_run, open_experiment, submission_text

__all__ = ["create_executor", "follow_or_leave", "load_nemo_run", "open_experiment", "submission_text"]
