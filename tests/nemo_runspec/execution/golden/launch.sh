#!/usr/bin/env bash
# Runs on every node of the job.
set -euo pipefail
# A request to save comes to every process of the job; until the script listens, nobody may die of it.
trap '' USR1
cd "$(dirname "${BASH_SOURCE[0]}")"
unset RUNSPEC_PUBLISHED_DIR RUNSPEC_CODE_DIGEST RUNSPEC_GIT_COMMIT RUNSPEC_EXIT_CODE_FILE RUNSPEC_RESTARTS RUNSPEC_FRESH RUNSPEC_TOOL_TABLES
export RUNSPEC_JOB_DIR="$(dirname "$PWD")"
unset RUNSPEC_NODE_RANK RUNSPEC_NUM_NODES RUNSPEC_ATTEMPT RUNSPEC_CPUS_PER_NODE
if [ -n "${SLURM_STEP_ID:-}" ]; then
    export RUNSPEC_NODE_RANK="$SLURM_NODEID" RUNSPEC_NUM_NODES="$SLURM_STEP_NUM_NODES"
    export RUNSPEC_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$SLURM_STEP_ID"
    export RUNSPEC_CPUS_PER_NODE="${SLURM_CPUS_ON_NODE:-}"
fi
export RUNSPEC_OUTPUT_ROOT=/shared/output
export NOTE='it'"'"'s $HOME'

# startup_commands of the profile; those of others are seldom written for -u
launch_folder="$PWD"
set +u
trap 'echo "error: a startup command failed on $(hostname): $BASH_COMMAND" >&2; exit 2' ERR
module load cuda/12.8
source "$HOME/venv/bin/activate"
trap - ERR
set -u
cd "$launch_folder"

export PYTHONPATH="$PWD"/project/src:"$PWD"/runspec"${PYTHONPATH:+:$PYTHONPATH}"

for name in HF_TOKEN WANDB_API_KEY; do
    if [ -z "${!name:-}" ]; then
        echo "error: $name, a secret of this job, is not set on $(hostname)" >&2
        exit 2
    fi
done

exec python -m nemo_runspec.execution.node launch.json
