#!/usr/bin/env bash
# Runs on every node of the job.
set -euo pipefail
# A request to save comes to every process of the job; until the script listens, nobody may die of it.
trap '' USR1
cd "$(dirname "${BASH_SOURCE[0]}")"
unset RUNSPEC_PUBLISHED_DIR RUNSPEC_CODE_DIGEST RUNSPEC_GIT_COMMIT RUNSPEC_EXIT_CODE_FILE RUNSPEC_RESTARTS RUNSPEC_FRESH RUNSPEC_TOOL_TABLES RUNSPEC_ENV_FILE
export RUNSPEC_JOB_DIR="$(dirname "$PWD")"
unset RUNSPEC_NODE_RANK RUNSPEC_NUM_NODES RUNSPEC_ATTEMPT RUNSPEC_CPUS_PER_NODE
if [ -n "${SLURM_STEP_ID:-}" ]; then
    export RUNSPEC_NODE_RANK="$SLURM_NODEID" RUNSPEC_NUM_NODES="$SLURM_STEP_NUM_NODES"
    export RUNSPEC_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$SLURM_STEP_ID"
    export RUNSPEC_CPUS_PER_NODE="${SLURM_CPUS_ON_NODE:-}"
fi
export RUNSPEC_OUTPUT_ROOT=/shared/output
export NOTE='it'"'"'s $HOME'

refuse_job() {
    echo "error: $1" >&2
    [ "${RUNSPEC_NUM_NODES:-1}" = 1 ] || echo 2 > "$RUNSPEC_JOB_DIR/.node-$RUNSPEC_ATTEMPT-$RUNSPEC_NODE_RANK" || true
    exit 2
}

# startup_commands of the profile; those of others are seldom written for -u
launch_folder="$PWD"
set +u
trap '[ $? -eq 143 ] || refuse_job "a startup command failed on $(hostname): $BASH_COMMAND"' ERR
module load cuda/12.8
source "$HOME/venv/bin/activate"
trap - ERR
set -u
cd "$launch_folder"

export PYTHONPATH="$PWD"/project/src:"$PWD"/runspec"${PYTHONPATH:+:$PYTHONPATH}"

for name in HF_TOKEN WANDB_API_KEY; do
    if [ -z "${!name:-}" ]; then
        refuse_job "$name, a secret of this job, is not set on $(hostname)"
    fi
done

exec python -m nemo_runspec.execution.node launch.json
