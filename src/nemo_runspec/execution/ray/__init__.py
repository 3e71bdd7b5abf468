"""Ray: a job for a cluster that exists, and a Ray of a job's own inside a Slurm allocation.

The names here are the pieces of a command file.
"""

from nemo_runspec.execution.ray.following import follow
from nemo_runspec.execution.ray.jobs import how_to_follow, new_job_id, ray_runtime_env, submission_text, submit

__all__ = ["follow", "how_to_follow", "new_job_id", "ray_runtime_env", "submission_text", "submit"]
