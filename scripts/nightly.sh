#!/usr/bin/env bash
# Runs every test, the fault bench of checkpoints (docs/reliability.md) with its mutants, real runs of fixed and of random configurations,
# then the full parity table (docs/parity.md) in parallel slices that resume.
#
#   scripts/nightly.sh [FOLDER] [SLICES] [SEED]
#
# FOLDER (default: runs/nightly-COMMIT) contains the results of each slice; SLICES defaults to a fourth of the cores, SEED of the random
# configurations to the date, such as 20260131. Prints the cases, runs and rows that failed. The exit code is 0 if everything passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

folder=${1:-runs/nightly-$(git rev-parse --short HEAD)}
slices=${2:-$(($(nproc) >= 8 ? $(nproc) / 4 : 1))}
seed=${3:-$(date -u +%Y%m%d)}
mkdir -p "$folder"
code=0
OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n 2 --nightly 2>&1 | tee "$folder/tests.log" || code=1
"$PYTHON" scripts/fault_bench.py --output "$folder/faults.jsonl" 2>&1 | tee "$folder/faults.log" || code=1
"$PYTHON" scripts/fault_bench.py --mutants 2>&1 | tee "$folder/mutants.log" | tail -n 5 || code=1
"$PYTHON" -m megatrain.tools.main parity --runs --output "$folder/fixed" 2>&1 | tee "$folder/fixed.log" | grep -v ' equal ' || code=1
echo "random configurations: megatrain parity --random 200 --seed $seed"
"$PYTHON" -m megatrain.tools.main parity --random 200 --seed "$seed" --minutes 120 --output "$folder/random" 2>&1 |
  tee "$folder/random.log" | grep -v ' equal ' || code=1

jobs=()
for slice in $(seq "$slices"); do
  "$PYTHON" -m megatrain.tools.main parity --full --slice "$slice/$slices" \
    --results "$folder/$slice-of-$slices.jsonl" >"$folder/$slice-of-$slices.log" 2>&1 &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || code=1; done
for log in "$folder"/*-of-"$slices".log; do
  printf '%s: %s\n' "$log" "$(tail -n 1 "$log")"
  grep FAIL "$log"
done
exit $code
