"""Flags that Megatron-LM itself has no more, which scripts still carry. Written as in `megatron_table.py`.

Names and meanings: the history of its `arguments.py`, 2019 to 2025. The last paragraph is of a fork.
"""

from typing import Final

from megatrain.config.megatron.answers import here, later, never

_OF_OURS: Final = ", with data that preprocess_data.py made"
_NEW_NAMES: Final = {
    "--layernorm-epsilon=": "--norm-epsilon",
    "--override-lr-scheduler": "--override-opt-param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt-param-scheduler",
    "--checkpoint-num-layers=": "--recompute-num-layers",
    "--activations-checkpoint-method=": "--recompute-method",
    "--activations-checkpoint-num-layers=": "--recompute-num-layers",
    "--tiktoken-special-tokens=+": "--tokenizer-special-tokens",
    "--test-data=+": f"--test-data-path{_OF_OURS}",
    "--tokenizer-path=": "--tokenizer-model",
    "--tokenizer-model-type=": "--tokenizer-type",
}
_RENAMED: Final = (
    *(never("Megatron-LM has renamed it", old, instead=f"use {new}") for old, new in _NEW_NAMES.items()),
    never("renamed", "--train-data=+", instead=f"use --train-data-path{_OF_OURS}"),
    never("renamed", "--valid-data=+", instead=f"use --valid-data-path{_OF_OURS}"),
)

_GONE: Final = (
    never(
        "it is how fp16 works",
        "--dynamic-loss-scale",
        instead="leave this out: --fp16 without --loss-scale has a scale that moves",
    ),
    never(
        "layers do not share weights",
        "--num-unique-layers= --param-sharing-style=",
        instead="use --num-layers alone: each layer has weights of its own",
    ),
    never(
        "the learning rate goes on from the checkpoint's samples",
        "--no-load-lr-state",
        instead="use --override-opt-param-scheduler for this run's schedule, or --finetune to begin anew",
    ),
    never("a run always goes on in its data behind the last sample", "--resume-dataloader"),
    never(
        "training reads .bin and .idx files alone",
        "--use-npy-data-loader --lazy-loader --loose-json --presplit-sentences --input-data-sizes-file= --delim="
        " --text-key= --eval-text-key=",
        instead="use preprocess_data.py to make them, and --data-path to name them",
    ),
    never(
        "training reads index caches from --data-cache-path", "--cache-dir=", instead="use --data-cache-path"
    ),
    never(
        "the optimizer is moved to the host by another flag",
        "--cpu-optimizer",
        instead="use --optimizer-cpu-offload, with --optimizer-offload-fraction for a part",
    ),
    never(
        "the implementation decides which kernel updates on the host",
        "--cpu-torch-adam",
        instead="leave this out; --optimizer-cpu-offload keeps the optimizer's state in the host's memory",
    ),
    never(
        "sums of gradients and gathers of weights run beside the computation, each as soon as its layer is ready; to put"
        " them off is not offered, as it would change no result",
        "--delay-grad-reduce --delay-param-gather",
        instead="leave this out; --overlap-grad-reduce and --overlap-param-gather are on by default",
    ),
    never(
        "files are read when they are needed", "--mmap-warmup", instead="leave this out; nothing else changes"
    ),
    never(
        "BERT, T5 and retrieval models are not part of megatrain",
        "--pipeline-model-parallel-split-rank= --encoder-tensor-model-parallel-size= --max-preds-per-seq="
        " --encoder-pipeline-model-parallel-size= --retro-add-retriever --retro-project-dir= --retro-workdir=",
        instead="leave this out and train a GPT",
    ),
    never("a model is built from layer specs alone", "--use-legacy-models"),
    never("gradients always live in contiguous buffers", "--no-contiguous-buffers-in-local-ddp"),
    never("nothing is reported to NVIDIA's one-logger", "--enable-one-logger"),
    never(
        "learning rate and batch size need no flag of their own",
        "--log-learning-rate-to-tensorboard --log-batch-size-to-tensorboard",
    ),
)

_AS_HERE: Final = (
    here("here datasets are always .bin and .idx files", "--data-impl=mmap"),
    here("here gradients always live in buffers of our own", "--DDP-impl=local"),
    here(
        "here gradients always live in contiguous buffers",
        "--use-contiguous-buffers-in-ddp --use-contiguous-buffers-in-local-ddp",
    ),
    here("so it is here", "--no-query-key-layer-scaling --no-async-tensor-model-parallel-allreduce"),
    here(
        "here the implementation decides which operations are fused",
        "--no-scaled-masked-softmax-fusion --scaled-masked-softmax-fusion --scaled-upper-triang-masked-softmax-fusion"
        " --bias-dropout-fusion",
    ),
    here("here gradients are always summed in fp32, or in fp64", "--fp32-allreduce"),
    here("here norms always compute in fp32", "--fp32-layernorm"),
)

_NOT_YET: Final = (
    later(
        "computation beside what pipeline stages exchange",
        "--overlap-p2p-communication",
        instead="leave this out: results are the same, and steps take longer",
    ),
    later(
        "spreading what recomputation keeps over tensor ranks",
        "--distribute-checkpointed-activations",
        instead="use --recompute-granularity; with --sequence-parallel what is kept is spread anyway",
    ),
    later("a cut of the layers other than into equal stages", "--standalone-embedding-stage"),
    later("fp8 or fp4", "--fp8-hybrid --fp8-e4m3", instead="use --bf16"),
    never(
        "sizes say how experts lie on ranks",
        "--expert-parallel --moe-extended-tp",
        instead="use --expert-model-parallel-size and --expert-tensor-parallel-size",
    ),
    later(
        "a model of Mamba or linear-attention layers",
        "--hybrid-attention-ratio= --hybrid-mlp-ratio=",
        instead="leave this out: every layer is attention and an MLP, --num-layers of them",
    ),
)

_OF_FORKS: Final = (
    never(
        "DeepSpeed is not part of megatrain",
        "--deepspeed --deepspeed-config= --zero-stage= --deepspeed-activation-checkpointing --no-pipeline-parallel",
        instead="leave this out: --data-parallel-sharding-strategy has the stages of ZeRO, and"
        " --recompute-activations recomputes",
    ),
)

FORMER: Final = (*_RENAMED, *_GONE, *_AS_HERE, *_NOT_YET, *_OF_FORKS)

FORMER_FLAGS: Final = frozenset(word.partition("=")[0] for answer in FORMER for word in answer.flags.split())
