"""Every flag of typical launch scripts of Megatron-LM is understood."""

import pytest

from megatrain.config import parse

GPT2_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
    --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --distributed-backend nccl --save ckpt --load ckpt --attention-softmax-in-fp32 --no-masked-softmax-fusion
"""
LLAMA3_8B = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --micro-batch-size 1
    --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
    --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
    --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split 99,1,0
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
    --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
"""
MIXTRAL_8X7B = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path text_document --split 99990,8,2
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel --num-layers-per-virtual-pipeline-stage 8 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt --tensorboard-dir tb
    --no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B --moe-permute-fusion
"""
DEEPSEEK_V3 = """
    --use-mcore-models --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --qk-layernorm --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type flex
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --recompute-granularity selective
    --recompute-modules mla_up_proj mlp --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L --manual-gc
    --manual-gc-interval 10 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 8192 --train-samples 585937500 --lr 7.3e-6
    --position-embedding-type rope --rotary-base 10000 --no-rope-fusion --no-bias-swiglu-fusion
    --hidden-dropout 0 --attention-dropout 0 --data-path text_document --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model folder --dist-ckpt-strictness log_all --async-save --use-persistent-ckpt-worker
    --auto-detect-ckpt-format --ckpt-fully-parallel-load --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard --timing-log-level 0
"""
LLAMA2_MEGATRON = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --seq-length 4096 --max-position-embeddings 4096
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --tokenizer-type Llama2Tokenizer
    --tokenizer-model tokenizer.model --load llama --exit-on-missing-checkpoint --use-checkpoint-args --no-load-optim
    --no-load-rng --untie-embeddings-and-output-weights --use-rotary-position-embeddings --normalization RMSNorm
    --no-position-embedding --no-masked-softmax-fusion --attention-softmax-in-fp32 --swiglu --use-flash-attn --bf16
    --micro-batch-size 1 --train-iters 100 --lr 1e-4 --disable-bias-linear --make-vocab-size-divisible-by 1
    --no-async-tensor-model-parallel-allreduce --recompute-activations --finetune --encoder-num-layers 32
"""
FUNCTIONAL_TEST = """
    --num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --tensorboard-dir tb --micro-batch-size 4
    --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --timing-log-level 0
    --lr-decay-iters 320000 --save ckpt --load ckpt --data-path text_document --vocab-file vocab.json
    --merge-file merges.txt --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine
    --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --transformer-impl local --no-gradient-accumulation-fusion
    --attention-softmax-in-fp32 --use-checkpoint-opt_param-scheduler --use-mcore-models --ckpt-format torch_dist
    --dist-ckpt-strictness assume_ok_unexpected --dist-ckpt-optim-fully-reshardable --data-cache-path cache --bf16
    --attention-backend unfused --log-memory-to-tensorboard --deterministic-mode --apply-query-key-layer-scaling
    --no-ckpt-fully-parallel-save --no-bias-gelu-fusion --async-save --use-persistent-ckpt-worker
"""
SCRIPTS = {
    "GPT-2 345M": GPT2_345M, "Llama 3 8B": LLAMA3_8B, "Mixtral 8x7B": MIXTRAL_8X7B, "DeepSeek V3": DEEPSEEK_V3,
    "Llama 2 7B": LLAMA2_MEGATRON, "functional test": FUNCTIONAL_TEST,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_a_script_is_understood(name):
    """Each flag sets a value, or a note or a problem names it."""
    argv = SCRIPTS[name].split()
    request = parse(argv)
    messages = "\n".join((*request.notes, *map(str, request.problems)))
    assert "is not a flag" not in messages
    assert "follows no flag" not in messages
    for word in argv:
        flag = word.replace("_", "-")
        if word.startswith("--"):
            assert flag in messages or any(origin.detail == flag for origin in request.origins.values())
