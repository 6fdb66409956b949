#!/usr/bin/env bash
#SBATCH --job-name=megatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=slurm-%j.log
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Many nodes, one torchrun per node; the job is queued again when its time limit is reached:
#
#   sbatch --nodes=4 scripts/slurm/torchrun.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
#
# Arguments are passed to pretrain.py. scripts/slurm/srun.sh does the same without torchrun. With RESTARTS=3 a run whose
# ranks fail starts again within the job, up to three times, from its last checkpoint.
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

head_node=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
port=${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}

code=0
srun --kill-on-bad-exit=1 "${container[@]}" torchrun --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" --max-restarts "${RESTARTS:-0}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:$port" \
  pretrain.py "$@" "${limit[@]}" || code=$?
if ((code != 0 && stop_at > 0 && $(date +%s) >= stop_at - 120)); then
  echo "stopped at the time limit and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
