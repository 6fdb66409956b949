#!/usr/bin/env bash
#SBATCH --job-name=megatrain-array
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=USR1@300
#SBATCH --output=slurm-%A_%a.log
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Several runs, one per array task; each is queued again when its time limit is reached:
#
#   sbatch --array=0-2 scripts/slurm/array.sh runs.txt --config my-run.yaml --save-interval 500
#
# Line K of runs.txt, counted from 0, has the flags of task K, such as `--lr 1e-4 --save runs/a --load runs/a`; they follow
# the common flags. Give each run a --save folder of its own.
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

file=$1
shift
line=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$file")
if [[ -z "$line" ]]; then
  echo "error: $file has no line for task $SLURM_ARRAY_TASK_ID" >&2
  echo "  fix: sbatch --array=0-$(($(grep -c . "$file") - 1))" >&2
  exit 2
fi
read -r -a own <<<"$line"

code=0
srun --kill-on-bad-exit=1 "${container[@]}" python pretrain.py "$@" "${own[@]}" || code=$?
if [[ $code == 75 ]]; then
  echo "stopped early and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
