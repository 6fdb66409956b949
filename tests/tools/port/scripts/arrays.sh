#!/bin/bash
# A dense model on two hosts: arrays of flags, the usual style of examples.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS=8
HOSTS=${NUM_HOSTS:-2}
RANKS=$(($GPUS * $HOSTS))
CHECKPOINTS=$1        # a folder
CORPUS="${2}_text_document"

LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $HOSTS
    --master_addr ${MASTER_ADDR:-localhost}   # the first host
)

MODEL=(
    --use-mcore-models
    --num_layers 32
    --hidden-size 4096 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096
    --layernorm-epsilon 1e-5
    --swiglu --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size=256
    --train-iters 1000
    --lr 3e-4 --lr 1.5e-4
    --bf16
    --attention-dropout 0 --hidden-dropout 0
)
if [[ $SAVE_MEMORY == 1 ]]; then
    TRAINING+=(--recompute-activations)
fi
OUTPUT=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 100 --wandb-exp-name "dense 7B")

if [ ! -d "$CHECKPOINTS" ]; then mkdir -p "$CHECKPOINTS"; fi

torchrun "${LAUNCH[@]}" pretrain_gpt.py \
    ${MODEL[@]} \
    "${TRAINING[@]}" \
    "${OUTPUT[@]}" \
    --data-path $CORPUS --split 949,50,1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file ${VOCAB} --merge-file ${MERGES} \
    --tensor-model-parallel-size ${TP:-2} "$@" 2>&1 | tee train.log
