#!/usr/bin/env bash
# Checks on a machine with GPUs: the GPU tests, Transformer Engine against the local implementation if it is installed, a small
# run under several layouts in fp64 and bf16, all strategies of data parallelism on 2 or 4 GPUs, the determinism of
# --deterministic-mode, and case A1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
out=${OUT:-/tmp/megatrain-gpu}
runs=/tmp/megatrain-gpu-runs
mkdir -p "$out" "$runs"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')

python3 -m pytest -q tests/gpu tests/kernels tests/model/implementations/test_attention.py tests/model/implementations/test_attention_options.py tests/data/samples/test_loader.py tests/checkpoint/test_checkpoint_blocks.py 2>&1 | tail -15

if python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("transformer_engine") is None)'; then
  timeout 300 python3 -m megatrain.tools.main parity --device cuda --transformer-impl transformer_engine 2>&1 | tee "$out/engine.log"
  timeout 500 python3 scripts/compare_implementations.py --output "$out/implementations" 2>&1 | tail -3
fi

small="--num-layers 4 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 768 --normalization RMSNorm --swiglu
  --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 256 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 4000 --micro-batch-size 4 --global-batch-size 32 --train-iters 20 --lr 1e-3
  --eval-iters 2 --log-interval 20 --save-interval 10"
declare -A layouts=([tp2]="--tensor-model-parallel-size 2" [tp2sp]="--tensor-model-parallel-size 2 --sequence-parallel"
  [dp2]="" [dp2zero0]="--no-use-distributed-optimizer" [pp2]="--pipeline-model-parallel-size 2")
for dtype in "--params-dtype float64" "--bf16"; do
  tag=${dtype##*-}
  tag=${tag##* }
  python3 pretrain.py $small $dtype --save "$runs/$tag-one" >"$out/$tag-one.log" 2>&1 || tail -20 "$out/$tag-one.log"
  if ((gpus > 1)); then
    for name in "${!layouts[@]}"; do
      timeout 120 python3 -m torch.distributed.run --nproc-per-node 2 pretrain.py $small $dtype ${layouts[$name]} \
        --save "$runs/$tag-$name" >"$out/$tag-$name.log" 2>&1 || tail -30 "$out/$tag-$name.log"
    done
  fi
done
python3 - "$runs" <<'PYTHON'
import json, pathlib, sys

def losses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]

for path in sorted(pathlib.Path(sys.argv[1]).glob("*/metrics.jsonl")):
    found = losses(path)
    alone = losses(path.parent.parent / (path.parent.name.split("-")[0] + "-one") / "metrics.jsonl")
    worst = max(abs(a - b) / b for a, b in zip(found, alone))
    print(f"{path.parent.name:20s} loss 1 {found[0]:.6f} loss 20 {found[-1]:.6f}; largest difference to one process {worst:.1e}")
PYTHON
if ((gpus > 1)); then
  timeout 240 python3 -m torch.distributed.run --nproc-per-node $((gpus < 4 ? 2 : 4)) scripts/check_data_parallel.py \
    2>"$out/data_parallel.err" | tee "$out/data_parallel.log"
  ((PIPESTATUS[0] == 0)) || tail -30 "$out/data_parallel.err"
fi
timeout 300 python3 scripts/check_determinism.py
time timeout 200 python3 pretrain.py --config configs/benchmarks/a1.yaml --metrics-file "$out/a1.jsonl" 2>&1 | grep -v "^  " | cut -c1-420 | tail -3
python3 -c "
import json
lines = [json.loads(line) for line in open('$out/a1.jsonl')]
last = sorted(lines[5:], key=lambda line: line['iteration_ms'])
print('A1 median', {k: last[len(last) // 2][k] for k in ('iteration_ms', 'tokens_per_second_per_gpu', 'tflops_per_gpu', 'mfu', 'max_memory_bytes')})"
