#!/usr/bin/env bash
#SBATCH --job-name=megatrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=slurm-%j.log
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# One node, with torchrun; the job is queued again when its time limit is reached:
#
#   sbatch scripts/slurm/one_node.sh --config my-run.yaml --save runs/one --load runs/one --save-interval 500
#
# Arguments are passed to pretrain.py.
set -euo pipefail

# sbatch runs a copy of this script; the job runs in the folder in which sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Since Slurm 22.05 srun does not take over --cpus-per-task of the job.
[[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# With CONTAINER_IMAGE (pyxis and enroot) the ranks run in a container that sees this folder and CONTAINER_MOUNTS.
container=()
if [[ -n "${CONTAINER_IMAGE:-}" ]]; then
  mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
  container=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts" "--container-workdir=$PWD")
else
  : # source /path/to/venv/bin/activate      <- your environment
fi
# torchrun hides the exit code of its ranks, so the run itself stops ten minutes before the time limit of the job.
limit=()
stop_at=0
if [[ -n "${SLURM_JOB_END_TIME:-}" ]]; then
  stop_at=$((SLURM_JOB_END_TIME - 600))
  minutes=$(((stop_at - $(date +%s)) / 60))
  limit=(--exit-duration-in-mins "$((minutes > 1 ? minutes : 1))")
fi

if ((${SLURM_JOB_NUM_NODES:-1} > 1)); then
  echo "error: the job has $SLURM_JOB_NUM_NODES nodes, and each would train a run of its own" >&2
  echo "  fix: sbatch --nodes=$SLURM_JOB_NUM_NODES scripts/slurm/torchrun.sh" >&2
  exit 2
fi

code=0
srun "${container[@]}" torchrun --standalone --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  pretrain.py "$@" "${limit[@]}" || code=$?
if ((code != 0 && stop_at > 0 && $(date +%s) >= stop_at - 120)); then
  echo "stopped at the time limit and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
