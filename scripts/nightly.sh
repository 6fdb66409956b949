#!/usr/bin/env bash
# The full table of parity (docs/parity.md) against one process, in slices side by side; each goes on where it was stopped.
#
#   scripts/nightly.sh [FOLDER] [SLICES]
#
# FOLDER (default: runs/parity-COMMIT) holds a file of results for each slice; SLICES is by default a fourth of the cores.
# Prints the rows that failed. Exit code: 0 if every row passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

folder=${1:-runs/parity-$(git rev-parse --short HEAD)}
slices=${2:-$(($(nproc) >= 8 ? $(nproc) / 4 : 1))}
mkdir -p "$folder"
jobs=()
for slice in $(seq "$slices"); do
  "$PYTHON" -m megatrain.tools.main parity --full --slice "$slice/$slices" \
    --results "$folder/$slice-of-$slices.jsonl" >"$folder/$slice-of-$slices.log" 2>&1 &
  jobs+=($!)
done
code=0
for job in "${jobs[@]}"; do wait "$job" || code=1; done
for log in "$folder"/*-of-"$slices".log; do
  printf '%s: %s\n' "$log" "$(tail -n 1 "$log")"
  grep FAIL "$log"
done
exit $code
