#!/usr/bin/env bash
# Trains a small language model of Python code from scratch on two CPU cores; only the libraries are downloaded.
#
#   scripts/quickstart.sh            a stage is skipped if its output exists, so a second call resumes or ends at once
#   scripts/quickstart.sh --fresh    deletes runs/quickstart first
#
# Half-way the training is killed with SIGKILL on purpose and resumed with the same command.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=runs/quickstart
config=configs/quickstart.yaml
metrics=$run/checkpoints/metrics.jsonl
data=$run/data/stdlib

case "${1:-}" in
  "") ;;
  --fresh) rm -rf "$run" ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [[ "$1" == --help || "$1" == -h ]] && exit 0 || exit 2 ;;
esac

say() { printf '\n==> %s\n' "$*"; }

# stage OUTPUT DESCRIPTION COMMAND...: runs the command unless its output exists.
stage() {
  local output=$1 description=$2 started=$SECONDS
  shift 2
  if [[ -e "$output" ]]; then
    say "$description: exists already ($output)"
    return
  fi
  say "$description"
  "$@"
  echo "took $((SECONDS - started)) s"
}

last_iteration() { "$PYTHON" scripts/quickstart/progress.py iteration "$metrics"; }
pretrain=(pretrain.py --config "$config")

# Trains in the background until the given iteration is logged, then kills the training as a power failure would.
train_and_kill_at() {
  local iteration=$1
  "$PYTHON" "${pretrain[@]}" &
  local pid=$!
  # The background process does not see Ctrl-C: it must not outlive this script.
  trap 'kill "$pid" 2>/dev/null || true' EXIT
  while kill -0 "$pid" 2>/dev/null; do
    # Each iteration has a line, so that they are read only if there may be enough: Python takes time from the training.
    if [[ -f "$metrics" ]] && (($(wc -l <"$metrics") >= iteration)) && (($(last_iteration) >= iteration)); then
      { kill -KILL "$pid" && wait "$pid"; } 2>/dev/null || true
      trap - EXIT
      say "killed with SIGKILL after iteration $(last_iteration)"
      return
    fi
    sleep 0.5
  done
  trap - EXIT
  wait "$pid"  # its exit code is ours when it failed
}

say "set-up: megatrain and its libraries in .venv"
source scripts/setup.sh ""
export PYTHONDONTWRITEBYTECODE=""  # with bytecode on disk, each of the programs below starts a second earlier

stage "$run/corpus.jsonl" "corpus: the source and the docstrings of Python's standard library, as JSON lines" \
  "$PYTHON" scripts/quickstart/corpus.py --output "$run/corpus.jsonl"

stage "$run/tokenizer.json" "tokenizer: a byte-level BPE of 4096 tokens, learnt from the corpus" \
  "$PYTHON" -m megatrain.tools.main tokenizer train --input "$run/corpus.jsonl" --output "$run" --vocab-size 4096

mkdir -p "${data%/*}"
stage "${data}_text_document.idx" "data: the corpus as tokens, in the .bin/.idx files of Megatron-LM" \
  "$PYTHON" preprocess_data.py --input "$run/corpus.jsonl" --json-keys text --append-eod --workers 2 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer.json" --output-prefix "$data"

if [[ -e "$run/complete" ]]; then
  say "training: complete already ($run/checkpoints); --fresh starts over"
else
  # Near the middle, a little after a checkpoint: some iterations run twice.
  half=$(($("$PYTHON" scripts/quickstart/progress.py train-iters "$config") * 11 / 25))
  if (($(last_iteration) < half)); then
    say "training: ${pretrain[*]}, to be killed half-way, at iteration $half"
    train_and_kill_at "$half"
  fi
  say "training, resumed from the last checkpoint by the same command: ${pretrain[*]}"
  "$PYTHON" "${pretrain[@]}"
  touch "$run/complete"
fi

prompt="def __init__(self"
say "generation: the model continues \"$prompt\""
"$PYTHON" -c 'from megatrain.tools.main import main; raise SystemExit(main())' \
  generate --load "$run/checkpoints" --prompt "$prompt"

say "done in $SECONDS s"
"$PYTHON" scripts/quickstart/progress.py report "$metrics"
python="${PYTHON#"$PWD"/}"
cat <<EOF

What to look at next
  $metrics
      a JSON object per iteration and per validation
  ${python%/*}/megatrain report $run/checkpoints --output $run/report.html
      a web page of its curves
  $config
      every setting of this run; $python pretrain.py --help explains each
  ${python%/*}/torchrun --nproc-per-node 2 ${pretrain[*]} --tensor-model-parallel-size 2 --save /tmp/two --load /tmp/two
      the same run over two processes
  ${python%/*}/megatrain parity --quick
      a check that parallel layouts compute the same as one process
  ${python%/*}/megatrain generate --load $run/checkpoints --prompt "import os"
      another prompt for the model
  docs/README.md
      an overview of the documentation
EOF
