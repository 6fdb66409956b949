#!/usr/bin/env bash
# On a machine with one or more GPUs: the GPU tests, a run of the quickstart's shape under several layouts, and case A1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
out=${OUT:-/tmp/megatrain-gpu}
mkdir -p "$out"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')

python3 -m pytest -q tests/gpu tests/data/test_batch_loader.py 2>&1 | tail -15

small="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1536 --normalization RMSNorm --swiglu
  --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 512 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 4000 --micro-batch-size 4 --global-batch-size 32 --train-iters 20 --lr 1e-3
  --eval-iters 2 --log-interval 20 --bf16"
python3 pretrain.py $small --save "$out/one" --load "$out/one" --save-interval 10 >"$out/one.log" 2>&1 || tail -20 "$out/one.log"
declare -A layouts=([tp2]="--tensor-model-parallel-size 2" [tp2sp]="--tensor-model-parallel-size 2 --sequence-parallel"
  [dp2]="" [dp2zero0]="--no-use-distributed-optimizer" [pp2]="--pipeline-model-parallel-size 2")
if ((gpus > 1)); then
  for name in "${!layouts[@]}"; do
    timeout 120 python3 -m torch.distributed.run --nproc-per-node 2 pretrain.py $small ${layouts[$name]} \
      --save "$out/$name" >"$out/$name.log" 2>&1 || tail -30 "$out/$name.log"
  done
fi
python3 - "$out" <<'PYTHON'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line["lm_loss"] for line in lines if "lm_loss" in line]
    speeds = sorted(line["iteration_ms"] for line in lines if "lm_loss" in line)
    print(f"{path.parent.name:10s} loss 1 {losses[0]:.6f} loss 10 {losses[9]:.6f} loss 20 {losses[-1]:.6f} median {speeds[10]:.1f} ms")
PYTHON
time timeout 200 python3 pretrain.py --config configs/benchmarks/a1.yaml --metrics-file "$out/a1.jsonl" 2>&1 | grep -v "^  " | cut -c1-420 | tail -8
python3 -c "
import json
lines = [json.loads(line) for line in open('$out/a1.jsonl')]
last = sorted(lines[5:], key=lambda line: line['iteration_ms'])
print('A1 median', {k: last[len(last) // 2][k] for k in ('iteration_ms', 'tokens_per_second_per_gpu', 'tflops_per_gpu', 'mfu', 'max_memory_bytes')})"
