#!/usr/bin/env bash
#SBATCH --job-name=megatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Runs on Slurm with one task per GPU, and queues the job again when its time limit is reached:
#
#   sbatch --nodes=4 scripts/slurm.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
#
# Arguments are passed to pretrain.py. Ranks, hosts and ports are read from Slurm's variables. Five minutes before the time
# limit the ranks receive SIGUSR1: they save a checkpoint and exit with code 75, and the job is queued again. Any other exit
# code ends the job. Activate your environment, or start a container, at the marked line.
set -euo pipefail

# sbatch runs a copy of this script; the job runs in the folder in which sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The ranks prove to each other that they are of this job; srun passes the variable on.
MEGATRAIN_SECRET="${MEGATRAIN_SECRET:-$(head -c 32 /dev/urandom | base64)}"
export MEGATRAIN_SECRET
# source /path/to/venv/bin/activate      <- environment or container

code=0
# A rank that dies stops the others; --kill-on-bad-exit covers the case that this fails.
srun --kill-on-bad-exit=1 python pretrain.py "$@" || code=$?
if [[ $code == 75 ]]; then
  echo "stopped early and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
