#!/usr/bin/env bash
# Installs the developer tools, lints, checks format and types, and runs the tests.
#
#   scripts/test.sh [PYTEST ARGUMENTS]     for example: scripts/test.sh tests/data -k blend
#
# Stops at the first failing step with its exit code. Two processes run the tests with one thread each.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

"$PYTHON" -m ruff check
"$PYTHON" -m ruff format --check
"$PYTHON" -m mypy --num-workers 2
# Tests start hundreds of processes: with bytecode on disk, each starts a second earlier.
PYTHONDONTWRITEBYTECODE="" OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n 2 "$@"
