#!/usr/bin/env bash
#SBATCH --job-name=megatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@300
#SBATCH --output=slurm-%j.log
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Many nodes, one task per GPU; the job is queued again when its time limit is reached:
#
#   sbatch --nodes=4 scripts/slurm/srun.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
#
# Arguments are passed to pretrain.py. Ranks, hosts and ports are read from Slurm's variables. Five minutes before the time
# limit the ranks receive SIGUSR1: they save a checkpoint and exit with code 75, and the job is queued again. Any other exit
# code ends the job.
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

code=0
# A rank that dies stops the others; --kill-on-bad-exit covers the case that this fails.
srun --kill-on-bad-exit=1 "${container[@]}" python pretrain.py "$@" || code=$?
if [[ $code == 75 ]]; then
  echo "stopped early and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
