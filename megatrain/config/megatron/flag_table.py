"""Flags of Megatron-LM (core 0.20.0) that are not settings of megatrain, and choices of settings that are not available.

accepted_flags.py     ignored, with a note
pending_flags.py      ignored so far, with a note: the feature is missing, and results are the same without it
unsupported_flags.py  refused: the feature is missing
refused_flags.py      refused by design
removed_flags.py      flags that Megatron-LM has removed
other_programs.py     flags of the other programs of its repository
"""

from collections.abc import Mapping
from typing import Final

from megatrain.config.megatron.accepted_flags import ACCEPTED_FLAGS
from megatrain.config.megatron.answer import Alias
from megatrain.config.megatron.other_programs import OTHER_PROGRAMS
from megatrain.config.megatron.pending_flags import PENDING_FLAGS
from megatrain.config.megatron.refused_flags import REFUSED_FLAGS
from megatrain.config.megatron.removed_flags import REMOVED_FLAGS
from megatrain.config.megatron.unsupported_flags import UNSUPPORTED_FLAGS

ANSWERS: Final = (
    *ACCEPTED_FLAGS,
    *PENDING_FLAGS,
    *UNSUPPORTED_FLAGS,
    *REFUSED_FLAGS,
    *REMOVED_FLAGS,
    *OTHER_PROGRAMS,
)

ALIASES: Final[Mapping[str, Alias]] = {
    "--disable-dsa-indexer-scoring-relu": Alias("model.dsa_indexer_scoring_relu", "false"),
    "--disable-flight-recorder-dump-on-timeout": Alias("resilience.flight_recorder_dump_on_timeout", "false"),
    "--disable-flight-recorder-extra-dump-on-exec": Alias(
        "resilience.flight_recorder_extra_dump_on_exec", "false"
    ),
    "--disable-flight-recorder-include-only-active": Alias(
        "resilience.flight_recorder_include_only_active", "false"
    ),
    "--disable-fp8-wgrad": Alias("precision.fp8_wgrad", "false"),
    "--disable-manual-gc-eval": Alias("training.manual_gc_eval", "false"),
    "--enable-cuda-graph": Alias("training.cuda_graph_impl", "local"),
    "--pytorch-profiler-collect-shapes": Alias("logging.record_shapes", "true"),
    "--hybrid-context-parallel": Alias("parallel.dynamic_context_parallel", "true"),
    "--hybrid-override-pattern": Alias("model.hybrid_layer_pattern"),
    "--is-hybrid-model": Alias("model.model_family", "hybrid"),
    "--encoder-num-layers": Alias("model.num_layers"),
    "--encoder-seq-length": Alias("data.seq_length"),
    "--freeze-LM": Alias("vision.freeze_lm", "true"),
    "--freeze-ViT": Alias("vision.freeze_vit", "true"),
    "--persistent-save-interval": Alias("checkpoint.save_interval"),
    "--use-torch-fsdp2": Alias("parallel.data_parallel_sharding_strategy", "optim_grads_params"),
    "--use-rotary-position-embeddings": Alias("model.position_embedding_type", "rope"),
}

UNSUPPORTED_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "--non-persistent-ckpt-type": ("in_memory",),
    "--dataloader-type": ("external",),
    "--exp-avg-dtype": ("fp16", "fp8"),
    "--exp-avg-sq-dtype": ("fp16", "fp8"),
    "--fp4-recipe": ("custom",),
    "--fp8-recipe": ("custom",),
    "--muon-coefficient-type": ("cans", "aol", "deepseekv4", "custom"),
    "--muon-fp32-matmul-prec": ("low",),
    "--position-embedding-type": ("mrope",),
    "--transformer-impl": ("inference_optimized",),
}
"""Choices of Megatron-LM that are not supported; choices that a setting has take precedence."""

REPLACED_CHOICES: Final[Mapping[str, Mapping[str, str]]] = {
    "--optimizer": {
        "dist_muon": "use --optimizer muon; --use-distributed-optimizer, the default, shards its state"
    }
}
"""Choices of Megatron-LM with another name here, and the remedy."""
