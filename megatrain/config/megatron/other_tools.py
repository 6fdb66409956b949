"""Names that users of Hugging Face, PyTorch Lightning, nanoGPT and other tools type, and the remedy.

    --learning-rate      ->  use --lr
    --num-train-epochs   ->  use --train-iters or --train-samples: a run has no epochs

They are answered, not accepted: units and defaults often differ.
"""

from collections.abc import Mapping
from typing import Final

_SAME: Final = {
    # The model
    "--num-layers": "n-layers n-layer num-hidden-layers layers",
    "--hidden-size": "d-model n-embd dim hidden-dim model-dim embedding-dim",
    "--num-attention-heads": "n-heads n-head num-heads heads",
    "--ffn-hidden-size": "intermediate-size d-ff ffn-dim hidden-size-ffn",
    "--kv-channels": "head-dim",
    "--group-query-attention --num-query-groups": "num-key-value-heads n-kv-heads num-kv-heads",
    "--rotary-base": "rope-theta",
    "--norm-epsilon": "rms-norm-eps layer-norm-eps layer-norm-epsilon",
    "--hidden-dropout and --attention-dropout": "dropout",
    "--num-experts": "num-local-experts n-experts n-routed-experts",
    "--moe-router-topk": "num-experts-per-tok experts-per-token",
    "--attention-backend flash": "attn-implementation flash-attention flash-attn",
    # Parallelism
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size",
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel",
    "--context-parallel-size": "cp cp-size context-parallel",
    "--expert-model-parallel-size": "ep ep-size expert-parallel-size",
    "--expert-tensor-parallel-size": "etp etp-size",
    "--num-layers-per-virtual-pipeline-stage": "vpp vpp-size virtual-pipeline-size",
    "--sequence-parallel": "sp",
    "--data-parallel-sharding-strategy": "zero fsdp sharding-strategy",
    # Data and tokenizer
    "--seq-length": "context-length context-window block-size max-seq-len max-seq-length max-length",
    "--data-path": "dataset-name dataset-path data-dir train-file train-files data",
    "--tokenizer-model": "tokenizer tokenizer-name tokenizer-name-or-path",
    "--num-workers": "dataloader-num-workers",
    # Batch and length
    "--micro-batch-size": "per-device-train-batch-size per-device-batch-size device-batch-size micro-batch mbs",
    "--global-batch-size": "train-batch-size total-batch-size gbs",
    "--eval-global-batch-size": "per-device-eval-batch-size eval-batch-size",
    "--train-iters": "max-steps max-iters num-steps steps total-steps num-iterations iterations train-steps",
    "--seed": "random-seed",
    # Optimizer and schedule
    "--lr": "learning-rate max-lr",
    "--min-lr": "min-learning-rate lr-min",
    "--lr-decay-style": "lr-scheduler-type lr-scheduler scheduler lr-schedule",
    "--lr-warmup-iters": "warmup-steps num-warmup-steps warmup-iters",
    "--lr-warmup-fraction": "warmup-ratio",
    "--lr-decay-iters": "decay-steps",
    "--clip-grad": "max-grad-norm gradient-clip-val grad-clip gradient-clipping",
    "--adam-eps": "adam-epsilon",
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--optimizer": "optim",
    "--optimizer-cpu-offload": "cpu-offload offload-optimizer",
    # Precision and memory
    "--bf16 or --fp16": "dtype precision mixed-precision torch-dtype",
    "--recompute-activations": "gradient-checkpointing activation-checkpointing checkpoint-activations-per-layer",
    # Checkpoints and logs
    "--save": "output-dir checkpoint-dir save-dir save-path",
    "--load": "resume-from-checkpoint resume resume-from",
    "--save-interval": "save-steps save-every checkpoint-interval save-freq",
    "--keep-last": "save-total-limit keep-last-n",
    "--log-interval": "logging-steps log-every log-freq",
    "--eval-interval": "eval-steps eval-every val-interval",
    "--tensorboard-dir": "logging-dir tensorboard",
    "--wandb-project": "wandb report-to",
    "--wandb-exp-name": "run-name wandb-name",
}
"""Setting and the names that other tools have for it, without dashes."""

_OTHERWISE: Final = {
    "epochs num-epochs num-train-epochs max-epochs": "use --train-iters or --train-samples: a run has no epochs",
    "dp dp-size data-parallel data-parallel-size ddp": (
        "leave it out, and start more ranks with torchrun: the data-parallel size is the number of ranks, divided by the"
        " product of the other sizes"
    ),
    "num-gpus gpus n-gpus devices": "start that many ranks: torchrun --nproc-per-node GPUS pretrain.py ...",
    "gradient-accumulation-steps gradient-accumulation accumulate-grad-batches grad-accum": (
        "use --global-batch-size: --micro-batch-size * data-parallel size * the number of accumulated micro-batches"
    ),
    "tie-word-embeddings tie-embeddings": (
        "leave it out: embeddings are tied, unless --untie-embeddings-and-output-weights is given"
    ),
}

OTHER_TOOLS: Final[Mapping[str, str]] = {
    f"--{name}": f"use {flag}" for flag, names in _SAME.items() for name in names.split()
} | {f"--{name}": fix for names, fix in _OTHERWISE.items() for name in names.split()}
"""Flag of another tool, and the remedy."""
