"""Flags that Megatron-LM has removed and that scripts may still use; the last group comes from a fork.

`flags.py` defines the notation. Source: the history of Megatron-LM's `arguments.py`, 2019 to 2025.
"""

from typing import Final

from megatrain.config.megatron.answer import accepted, refused

_PREPROCESSED: Final = ", with data from preprocess_data.py"
RENAMED_FLAGS: Final = {
    "--batch-size=": "--micro-batch-size",
    "--model-parallel-size=": "--tensor-model-parallel-size",
    "--warmup=": "--lr-warmup-fraction",
    "--layernorm-epsilon=": "--norm-epsilon",
    "--override-lr-scheduler": "--override-opt-param-scheduler",
    "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt-param-scheduler",
    "--checkpoint-num-layers=": "--recompute-num-layers",
    "--activations-checkpoint-method=": "--recompute-method",
    "--activations-checkpoint-num-layers=": "--recompute-num-layers",
    "--tiktoken-special-tokens=+": "--tokenizer-special-tokens",
    "--train-data=+": f"--train-data-path{_PREPROCESSED}",
    "--valid-data=+": f"--valid-data-path{_PREPROCESSED}",
    "--test-data=+": f"--test-data-path{_PREPROCESSED}",
    "--tokenizer-path=": "--tokenizer-model",
    "--tokenizer-model-type=": "--tokenizer-type",
}
"""Old flags in the notation of `flags.py`, and their new names."""
_RENAMED: Final = tuple(
    refused("Megatron-LM has renamed it", old, instead=f"use {new}") for old, new in RENAMED_FLAGS.items()
)

_REMOVED: Final = (
    refused(
        "dynamic scaling is the default of fp16",
        "--dynamic-loss-scale",
        instead="remove the flag; --fp16 without --loss-scale scales dynamically",
    ),
    refused(
        "sharing weights between layers is not supported",
        "--num-unique-layers= --param-sharing-style=",
        instead="use --num-layers only: each layer has its own weights",
    ),
    refused(
        "the learning rate continues from the samples consumed by the checkpoint",
        "--no-load-lr-state",
        instead="use --override-opt-param-scheduler for the schedule of this run, or --finetune to start from scratch",
    ),
    refused("a run always resumes its data after the last consumed sample", "--resume-dataloader"),
    refused(
        "training reads only .bin and .idx files",
        "--use-npy-data-loader --lazy-loader --loose-json --presplit-sentences --input-data-sizes-file= --delim="
        " --text-key= --eval-text-key=",
        instead="use preprocess_data.py to create them, and --data-path to name them",
    ),
    refused("index caches are in --data-cache-path", "--cache-dir=", instead="use --data-cache-path"),
    refused(
        "this is an old name",
        "--cpu-optimizer",
        instead="use --optimizer-cpu-offload, with --optimizer-offload-fraction for a part",
    ),
    refused(
        "the implementation decides which kernel updates on the host",
        "--cpu-torch-adam",
        instead="remove the flag; --optimizer-cpu-offload keeps the optimizer state in host memory",
    ),
    refused(
        "gradient reductions and weight all-gathers always start as soon as a layer is ready; delaying them would"
        " not change results",
        "--delay-grad-reduce --delay-param-gather",
        instead="remove the flag; --overlap-grad-reduce and --overlap-param-gather are on by default",
    ),
    refused("files are read when needed", "--mmap-warmup", instead="remove the flag; nothing else changes"),
    refused(
        "an encoder has the ranks of its decoder, and both share the stages by cost",
        "--pipeline-model-parallel-split-rank= --encoder-tensor-model-parallel-size="
        " --encoder-pipeline-model-parallel-size=",
        instead="remove the flag; --tensor-model-parallel-size and --pipeline-model-parallel-size are those of both",
    ),
    refused(
        "samples have as many labels as --mask-prob draws",
        "--max-preds-per-seq=",
        instead="remove the flag, or set --mask-prob",
    ),
    refused(
        "retrieval models are not part of megatrain",
        "--retro-add-retriever --retro-project-dir= --retro-workdir=",
        instead="remove the flag and train a GPT",
    ),
    refused("models are built from layer specs only", "--use-legacy-models"),
    refused("gradients are always in contiguous buffers", "--no-contiguous-buffers-in-local-ddp"),
    refused("nothing is sent to NVIDIA one-logger", "--enable-one-logger"),
    refused(
        "learning rate and batch size are always logged",
        "--log-learning-rate-to-tensorboard --log-batch-size-to-tensorboard",
    ),
)

_ACCEPTED: Final = (
    accepted("datasets are always .bin and .idx files", "--data-impl=mmap"),
    accepted(
        "gradients are always in contiguous buffers",
        "--DDP-impl=local --use-contiguous-buffers-in-ddp --use-contiguous-buffers-in-local-ddp",
    ),
    accepted(
        "each direction between two stages has its own communicator, so their messages need no batches",
        "--batch-p2p-communication",
    ),
    accepted("it is the default", "--no-query-key-layer-scaling --no-async-tensor-model-parallel-allreduce"),
    accepted(
        "the implementation decides which operations are fused",
        "--no-scaled-masked-softmax-fusion --scaled-masked-softmax-fusion"
        " --scaled-upper-triang-masked-softmax-fusion --bias-dropout-fusion",
    ),
    accepted("gradients are always reduced in fp32 or fp64", "--fp32-allreduce"),
    accepted("norms are always computed in fp32", "--fp32-layernorm"),
)

_UNSUPPORTED: Final = (
    refused(
        "sharding saved activations across tensor-parallel ranks is not supported",
        "--distribute-checkpointed-activations",
        instead="use --recompute-granularity; --sequence-parallel shards what is saved anyway",
    ),
    refused(
        "the layers of each stage are named by another flag",
        "--standalone-embedding-stage",
        instead="use --pipeline-model-parallel-layout with a stage of E alone, such as 'E|tt|ttL' for four layers on three stages",
    ),
    refused(
        "FP8 is chosen by its format",
        "--fp8-hybrid --fp8-e4m3",
        instead="use --fp8-format hybrid or --fp8-format e4m3",
    ),
    refused(
        "sizes determine how experts are split across ranks",
        "--expert-parallel --moe-extended-tp",
        instead="use --expert-model-parallel-size and --expert-tensor-parallel-size",
    ),
)

_FORKS: Final = (
    refused(
        "DeepSpeed is not part of megatrain",
        "--deepspeed --deepspeed-config= --zero-stage= --deepspeed-activation-checkpointing"
        " --no-pipeline-parallel",
        instead=(
            "remove the flag; --data-parallel-sharding-strategy has the ZeRO stages, and --recompute-activations"
            " recomputes"
        ),
    ),
)

REMOVED_FLAGS: Final = (*_RENAMED, *_REMOVED, *_ACCEPTED, *_UNSUPPORTED, *_FORKS)
