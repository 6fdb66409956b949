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
#SBATCH --no-kill
# Many nodes, one task per GPU; the job is queued again when its time limit is reached:
#
#   sbatch --nodes=4 scripts/slurm/srun.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
#
# Arguments are passed to pretrain.py. Ranks, hosts and ports are read from Slurm's variables. Five minutes before the time
# limit the ranks receive SIGUSR1: they save a checkpoint and exit with code 75, and the job is queued again. Any other exit
# code ends the job.
#
# With SPARES=1 the last node waits, and replaces one that is lost: the ranks that stay keep their processes (--inprocess-restart):
#
#   SPARES=1 sbatch --nodes=5 scripts/slurm/srun.sh --config my-run.yaml --save /shared/run --load /shared/run --save-interval 500
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
if ((${SPARES:-0} == 0)); then
  # A rank that dies stops the others; --kill-on-bad-exit covers the case that this fails.
  srun --kill-on-bad-exit=1 "${container[@]}" python pretrain.py "$@" || code=$?
else
  active=$(((SLURM_JOB_NUM_NODES - SPARES) * ${SLURM_NTASKS_PER_NODE:-8}))
  # Tasks of lost nodes have exit codes of their own: the job has that of rank 0.
  export CODE_FILE="slurm-$SLURM_JOB_ID.code"
  # shellcheck disable=SC2016
  srun --kill-on-bad-exit=0 --no-kill "${container[@]}" \
    bash -c 'python pretrain.py "$@"; code=$?; ((SLURM_PROCID)) || echo "$code" >"$CODE_FILE"; exit "$code"' - \
    "$@" --inprocess-restart --inprocess-active-world-size "$active" || code=$?
  code=$(cat "$CODE_FILE" || echo "$code")
  rm -f "$CODE_FILE"
fi
if [[ $code == 75 ]]; then
  echo "stopped early and saved: the job is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
