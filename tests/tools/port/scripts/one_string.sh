#! /bin/bash
# A mixture of experts on one host: strings with line continuations.
LAYERS=$(python count_layers.py)
DIST="--nproc_per_node 8 --nnodes 1"
EXPERTS="--num-experts 8 \
  --moe-router-topk 2 \
  --moe-layer-freq ([0]*1+[1]*3) \
  --moe-token-dispatcher-type alltoall \
  --expert-model-parallel-size 4"
ARGS="--num-layers $LAYERS \
  --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
  --batch-size 2 --global-batch-size 64 --train-samples 6400 --lr 1e-4 \
  --disable-bias-linear --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
  --use-rotary-position-embeddings --fp4-format e2m1"
ARGS="$ARGS $EXPERTS"
ARGS+=" --log-throughput"
CMD="python -m torch.distributed.launch $DIST ./Megatron-LM/pretrain_gpt.py $ARGS"
echo "$CMD"
$CMD
