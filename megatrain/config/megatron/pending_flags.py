"""Flags of Megatron-LM for speed, memory or supervision that have no effect so far. Results are the same without them.

`flags.py` defines the notation. Remove a flag here when a setting of its name is added.
"""

from typing import Final

from megatrain.config.megatron.answer import pending
from megatrain.config.schema.pipeline_schedules import names_of

PENDING_FLAGS: Final = (
    pending(
        "delayed weight gradients in other schedules than zero bubble",
        f"--pipeline-schedule {names_of(lambda one: one.splits_backward, 'and')} compute weight gradients, the head's too,"
        " while a stage would wait",
        "--delay-wgrad-compute --defer-embedding-wgrad-compute --wgrad-deferral-limit=*",
    ),
    pending(
        "a choice of the layers whose tensor-parallel communication is overlapped",
        "--tp-comm-overlap overlaps it in all layers",
        "--tp-comm-overlap-cfg=* --tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend=*"
        " --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs"
        " --disable-tp-comm-overlap-rs --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs"
        " --disable-tp-comm-split-rs",
    ),
    pending(
        "registration of gradients and weights with NCCL",
        "its kernels copy them; TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 lets PyTorch register its whole memory",
        "--use-nccl-ub",
    ),
    pending(
        "a high priority of expert communication alone, and an earlier release of attention's memory",
        "--overlap-moe-expert-parallel-comm runs without them; --high-priority-stream-groups ep has the priority",
        "--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream",
    ),
    pending(
        "CUDA graphs of parts of a model",
        "--cuda-graph-impl local records the whole micro-batch",
        "--cuda-graph-modules=+* --cuda-graph-scope=+* --external-cuda-graph --optimizer-cuda-graph"
        " --moe-pad-experts-for-cuda-graph-inference",
    ),
    pending(
        "a choice of how much is offloaded, and when",
        "all that --offload-modules names is copied at once",
        "--activation-offload-fraction=* --delay-offload-until-cuda-graph"
        " --delta-offload-bytes-across-pp-ranks=*",
    ),
    pending(
        "expert activations outside the PyTorch allocator",
        "they are allocated like all others; --recompute-modules moe_act saves memory too",
        "--moe-paged-stash --moe-paged-stash-page-size=* --moe-paged-stash-buffer-size-factor-cpu=*"
        " --moe-paged-stash-buffer-size-factor-cuda=*",
        saves_memory=True,
    ),
    pending(
        "fused operations of Transformer Engine",
        "its layers run as modules",
        "--use-transformer-engine-op-fuser",
    ),
    pending(
        "detection of faulty hardware",
        "--rerun-mode computes a step that is not finite again, and megatrain doctor tests GPUs before a run",
        "--gpu-sniff-test-interval=* --result-rejected-tracker-filename=* --train-sync-interval=*",
    ),
)
