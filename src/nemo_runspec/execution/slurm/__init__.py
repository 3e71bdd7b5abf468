"""Slurm through NeMo-Run: submit, stay attached, behind SSH. The names here are the pieces of a command file."""

from nemo_runspec.execution.slurm.following import follow
from nemo_runspec.execution.slurm.submit import (
    create_executor,
    experiment_options,
    how_to_follow,
    load_nemo_run,
    submission_text,
    submitted_jobs,
    submitting,
)

__all__ = [
    "create_executor",
    "experiment_options",
    "follow",
    "how_to_follow",
    "load_nemo_run",
    "submission_text",
    "submitted_jobs",
    "submitting",
]
