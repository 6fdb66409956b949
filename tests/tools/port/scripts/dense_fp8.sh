#!/bin/bash
# A dense model on eight hosts, in the style of examples: settings by environment, a choice of precision, arrays.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NCCL_IB_TIMEOUT=22

CHECKPOINT_PATH=${1:-"/lustre/checkpoints/dense 8b"}
TENSORBOARD_PATH=${2:-"$CHECKPOINT_PATH/tensorboard"}
DATA=${3:-MOCK}
mkdir -p "$(dirname "$CHECKPOINT_PATH")" > /dev/null 2>&1 || { echo "no folder" >&2; exit 1; }

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-8}
WORLD_SIZE=$((GPUS_PER_NODE * NUM_NODES))
PRECISION=${PRECISION:-fp8}
SIZE=${SIZE:-8b}

DISTRIBUTED=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost} --master_port ${MASTER_PORT:-6000})
case $SIZE in
    8b)  SHAPE=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32) TP=1 ;;
    70b) SHAPE=(--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64) TP=8 ;;
    *) echo "no size $SIZE"; exit 1 ;;
esac
MODEL=("${SHAPE[@]}" --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 --untie-embeddings-and-output-weights --init-method-std 0.0134)
TRAINING=(--micro-batch-size 1 --global-batch-size $((2 * WORLD_SIZE)) --train-samples 1953125 --lr 1.5e-4
    --min-lr 1.0e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --bf16)
DTYPE=()
if [[ "$PRECISION" = "fp8" ]]; then
    DTYPE+=(--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max)
fi
if (( NUM_NODES > 1 )); then PARALLEL=(--tensor-model-parallel-size $TP --context-parallel-size 1 --use-distributed-optimizer); fi

data_flags() {
    if [[ $1 == MOCK ]]; then
        echo "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256"
    else
        echo "--data-path $1 --tokenizer-type HuggingFaceTokenizer --tokenizer-model $2"
    fi
}
OUTPUT=(--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --tensorboard-dir "$TENSORBOARD_PATH")

torchrun "${DISTRIBUTED[@]}" "${MEGATRON:-.}/pretrain_gpt.py" "${MODEL[@]}" "${TRAINING[@]}" ${DTYPE[@]+"${DTYPE[@]}"} \
    "${PARALLEL[@]}" $(data_flags "$DATA" "${4:-tokenizer.json}") "${OUTPUT[@]}" 2>&1 | tee "$CHECKPOINT_PATH/log.txt"
