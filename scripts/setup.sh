#!/usr/bin/env bash
# Creates .venv in the repository's root and installs megatrain in it; repeats the installation only if its inputs changed.
#
#   scripts/setup.sh [EXTRAS]          EXTRAS as in pyproject.toml: dev, or wandb,tensorboard; none by default
#   source scripts/setup.sh [EXTRAS]   the same from a script; sets $PYTHON to the interpreter
#
# MEGATRAIN_PYTHON=/path/to/python uses that interpreter and installs nothing.
# Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu avoids the download of the CUDA libraries.

_setup_say() { printf 'setup: %s\n' "$*" >&2; }

# Prints the first interpreter that is new enough and can create a virtual environment.
_setup_find_python() {
  local name found=""
  for name in python3.12 python3.11 python3; do
    "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$name"; return; }
    found+="$("$name" -c 'import sys; print(" ", sys.executable, "is", sys.version.split()[0])' 2>/dev/null)" || true
  done
  _setup_say "megatrain needs Python 3.11 or newer with its venv module; found:${found:- no Python at all}"
  _setup_say "fix: install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), or point MEGATRAIN_PYTHON at an interpreter"
  return 1
}

_setup_digest() {
  "$1" - "$2" "$2/pyproject.toml" "$2/constraints.txt" <<'PYTHON'
import hashlib, pathlib, sys

contents = [pathlib.Path(path).read_bytes() for path in sys.argv[2:]]
print(hashlib.sha256(b"\0".join([sys.argv[1].encode(), *contents])).hexdigest())
PYTHON
}

# Runs pip with its output in .venv/setup.log; prints the end of the log if pip fails.
_setup_pip() {
  local log="$1/.venv/setup.log"
  "$1/.venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "${@:2}" -c "$1/constraints.txt" >>"$log" 2>&1 && return
  tail -n 25 "$log" >&2
  _setup_say "pip failed; all it said is in $log"
  return 1
}

# True if these extras were installed from the current files; without extras, true if any set was.
_setup_is_current() {
  local stamp
  for stamp in "$1"/.venv/.installed-${2:-*}; do
    [[ -f "$stamp" && "$(<"$stamp")" == "$3" ]] && return
  done
  return 1
}

# The stamp of a set of extras contains a digest of the root (the folder may have moved) and of the two files that define the installation.
_setup_main() {
  local root extras="${1:-}" base digest="" started=$SECONDS
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" || return
  if [[ -n "${MEGATRAIN_PYTHON:-}" ]]; then
    PYTHON="$(command -v "$MEGATRAIN_PYTHON")" || { _setup_say "MEGATRAIN_PYTHON=$MEGATRAIN_PYTHON is no program"; return 1; }
    _setup_say "using $PYTHON as it is (MEGATRAIN_PYTHON)"
    return
  fi
  PYTHON="$root/.venv/bin/python"
  digest="$(_setup_digest "$PYTHON" "$root" 2>/dev/null)" && _setup_is_current "$root" "$extras" "$digest" && return
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    base="$(_setup_find_python)" || return
    _setup_say "making $root/.venv with $base"
    "$base" -m venv --clear "$root/.venv" || return
    digest="$(_setup_digest "$PYTHON" "$root")" || return
  fi
  _setup_say "installing megatrain${extras:+ with [$extras]} into .venv; the first time takes a minute, more where torch is downloaded"
  # The build tools are pinned and kept, so that a later change of pyproject.toml needs no network.
  _setup_pip "$root" hatchling editables || return
  _setup_pip "$root" --no-build-isolation -e "$root${extras:+[$extras]}" || return
  # Only the modules of torch that runs import are compiled to bytecode now, which saves most of the time.
  PYTHONDONTWRITEBYTECODE="" "$PYTHON" -W ignore -c 'import torch, torch._dynamo, torch.distributed.tensor' || return
  printf '%s' "$digest" >"$root/.venv/.installed-${extras:-base}"
  _setup_say "done in $((SECONDS - started)) s"
}

_setup_main "${1:-}"
