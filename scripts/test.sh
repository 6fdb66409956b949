#!/usr/bin/env bash
# Sets up with the developer's tools, then lints, checks the format and the types, and runs the tests.
#
#   scripts/test.sh [PYTEST ARGUMENTS]     for example: scripts/test.sh tests/data -k blend
#
# Stops at the first of the four that fails, with its exit code. Tests that start ranks set OMP_NUM_THREADS=1 themselves.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
"$PYTHON" -m mypy
"$PYTHON" -m pytest -n 2 "$@"
