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
# A run on Slurm, one task a GPU, that goes on by itself when its time is up:
#
#   sbatch --nodes=4 scripts/slurm.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
#
# Everything behind the script's name is for pretrain.py. Ranks, hosts and ports are read from Slurm's variables.
# Five minutes before the end the ranks get SIGUSR1: they save, and end with exit code 75, upon which the job is queued
# again. Any other exit code ends the job. Activate your environment, or start a container, where the comment says so.
set -euo pipefail

# sbatch runs a copy of this script: the job's folder is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# source /path/to/venv/bin/activate

code=0
# A rank that dies ends the others by itself; --kill-on-bad-exit helps where even that fails.
srun --kill-on-bad-exit=1 python pretrain.py "$@" || code=$?
if [[ $code == 75 ]]; then
  echo "stopped early and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
