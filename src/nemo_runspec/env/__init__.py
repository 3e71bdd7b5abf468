"""`env.toml`: where jobs run and where things are kept, per user or per project, outside the recipes.

A table is a profile (`--run NAME`), except the reserved ones. Secrets stand here by name, never by value::

    [artifacts]
    root = "~/artifacts"              # RUNSPEC_ARTIFACTS_ROOT goes before it

    [slurm]
    executor = "slurm"
    account = "research"
    run_partition = "interactive"
    batch_partition = "batch"
    secrets = ["HF_TOKEN"]

    [dgx]
    extends = "slurm"
    tunnel = "ssh"
    host = "login.example.org"
    user = "me"
    job_dir = "/lustre/me/jobs"

The file is looked for from the current directory upwards; NEMOTRON_ENV_FILE names another one. `env.example.toml` has
every key. A config may hold the keys of an executor too, under `run.env`; which source wins: `parse_env`.
"""

from nemo_runspec.env.file import find_env_file, load_tables, wandb_settings
from nemo_runspec.env.keys import CODE_LIMIT
from nemo_runspec.env.profile import Env, RaySettings, SlurmSettings, Ssh, executor_of, parse_env
from nemo_runspec.env.roots import artifacts_root, output_root
from nemo_runspec.env.run_env import run_env

__all__ = [
    "CODE_LIMIT",
    "Env",
    "RaySettings",
    "SlurmSettings",
    "Ssh",
    "artifacts_root",
    "executor_of",
    "find_env_file",
    "load_tables",
    "output_root",
    "parse_env",
    "run_env",
    "wandb_settings",
]
