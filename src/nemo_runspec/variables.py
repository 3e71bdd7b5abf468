"""The environment variables by which a command and the scripts that it starts, here or elsewhere, know each other."""

from __future__ import annotations

# The env.toml in force.
ENV_FILE = "RUNSPEC_ENV_FILE"
# Where runs live, and where the artifact registry is: a path, or for the latter a URL.
OUTPUT_ROOT = "RUNSPEC_OUTPUT_ROOT"
ARTIFACTS_ROOT = "RUNSPEC_ARTIFACTS_ROOT"
# Set by `--force`: a run starts afresh where an unfinished one of the same fingerprint lies.
FRESH = "RUNSPEC_FRESH"

# Of a job on a cluster: the folder that its nodes share and that a requeued attempt finds again; where the jobs of a
# pipeline leave what they have published; which code travelled, and the commit that it came from.
JOB_DIR = "RUNSPEC_JOB_DIR"
PUBLISHED_DIR = "RUNSPEC_PUBLISHED_DIR"
CODE_DIGEST = "RUNSPEC_CODE_DIGEST"
GIT_COMMIT = "RUNSPEC_GIT_COMMIT"

# Where a job has several nodes: which of how many this one is, and an id that all of them have and that no other start
# of the job has. launch.sh sets them from Slurm's own; another launcher sets them before `bash launch.sh`. MASTER_ADDR
# goes with them, the address of the first node, and MASTER_PORT, if not any port will do.
NODE_RANK = "RUNSPEC_NODE_RANK"
NUM_NODES = "RUNSPEC_NUM_NODES"
ATTEMPT = "RUNSPEC_ATTEMPT"
# How many CPUs of the node are the job's, where that is not all that the node has.
CPUS_PER_NODE = "RUNSPEC_CPUS_PER_NODE"
OF_ONE_NODE = (NODE_RANK, NUM_NODES, ATTEMPT, CPUS_PER_NODE)

# Names of the tables of [tool] whose values a job has as variables, since env.toml stays where it was submitted.
TOOL_TABLES = "RUNSPEC_TOOL_TABLES"

# torchrun reduces every failure of its workers to exit code 1. Where this variable names a file, rank 0 leaves its
# own exit code there, and the launcher returns that one.
EXIT_CODE_FILE = "RUNSPEC_EXIT_CODE_FILE"
# Set where the launcher starts workers again that end with another code than 0: one that has saved then ends with 0.
RESTARTS = "RUNSPEC_RESTARTS"
# What a run that is started within another one must not take over from it, beside JOB_DIR.
OF_ONE_JOB = (PUBLISHED_DIR, CODE_DIGEST, GIT_COMMIT, EXIT_CODE_FILE, RESTARTS, FRESH, TOOL_TABLES)

# Ray's own: where a script finds the Ray that it is to use.
RAY_ADDRESS = "RAY_ADDRESS"
