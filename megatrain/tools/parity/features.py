"""The features that `megatrain parity` compares with one another.

    OPTIONS        ──> rows: every pair of words is in at least one (rows.py), and real runs (runs/)
    NUMBER_FORMATS ──> additional rows in fp32, bf16 and fp16 (low_precision.py)

The table lists features, not sizes: tensor parallelism is verified for the sizes 2, 3, 4 and 8 and allowed for any.

To add a value of an option, add its name and its flags, as a `Feature` if it needs or excludes others of its own. To add an option, add
one with at least two features; the first is the default of a row. To add a model, add a line to models.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from megatrain.config.schema.pipeline_schedules import (
    ONE_CHUNK,
    PIPELINE_SCHEDULES,
    flags_of_schedule,
    word_of_schedule,
)


@dataclass(frozen=True)
class Feature:
    """One value of an option."""

    name: str
    flags: str | Mapping[str, str] = ""
    """Flags that select it; or several row words, with the flags of each."""
    needs: tuple[str, ...] = ()
    """Required features, at least one; without them this one has no effect, and no row covers it."""
    excludes: tuple[str, ...] = ()
    """Features that the rules of `resolve` refuse together with this one."""

    def words(self) -> Mapping[str, str]:
        """Return the row words of this feature, with the flags of each."""
        return {self.name: self.flags} if isinstance(self.flags, str) else self.flags


@dataclass(frozen=True)
class Option:
    """A choice that every run makes, with its features as values."""

    name: str
    features: tuple[Feature, ...]
    is_layout: bool = False
    """True: decides how the work is split, not the result; the one-process reference of parity omits it."""

    def words(self) -> dict[str, str]:
        """Return the row words of all features, with the flags of each. The first word is the default."""
        return {word: flags for feature in self.features for word, flags in feature.words().items()}


def _option(
    name: str,
    *features: Feature,
    needs: tuple[str, ...] = (),
    is_layout: bool = False,
    **flags: str | Mapping[str, str],
) -> Option:
    """Return an option.

    Args:
        needs: of all features but the first.
        flags: of further features, by name.
    """
    default, *others = (*features, *(Feature(feature, own) for feature, own in flags.items()))
    return Option(name, (default, *(replace(one, needs=one.needs or needs) for one in others)), is_layout)


_layout = functools.partial(_option, is_layout=True)


def _sizes(flag: str, word: str, *numbers: int) -> dict[str, str]:
    """Return row words such as `tp2`, each with the flag and its number. Without a flag the size is derived."""
    return {f"{word}{size}": f"{flag} {size}" if flag else "" for size in numbers}


_ANY_SIZE: Final = "--min-offloaded-tensor-size 0"
_MODULES: Final = "--fine-grained-activation-offloading --offload-modules"
_REPLICAS: Final = ("dp", "cp")
"""Features that create replicas: a run that uses neither has one replica only."""

OPTIONS: Final[tuple[Option, ...]] = (
    _layout("tensor parallelism", tp1="", tp=_sizes("--tensor-model-parallel-size", "tp", 2, 3, 4, 8)),
    _option(
        "key-value replication",
        nocopies="",
        copies=_sizes("--group-query-attention --num-query-groups", "groups", 1, 2, 4),
        needs=("tp",),
    ),
    _layout("sequence parallelism", nosp="", sp="--sequence-parallel", needs=("tp",)),
    _layout(
        "tensor communication", tpwaits="--no-tp-comm-overlap", tpoverlap="--tp-comm-overlap", needs=("sp",)
    ),
    _layout("context parallelism", cp1="", cp=_sizes("--context-parallel-size", "cp", 2, 4)),
    _layout(
        "context communication",
        ring="--cp-comm-type p2p",
        allgather="--cp-comm-type all_gather",
        heads="--cp-comm-type a2a",
        a2aring="--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        a2agather="--cp-comm-type a2a+all_gather --hierarchical-context-parallel-sizes 2 2",
        mixedcomm="--cp-comm-type p2p all_gather a2a p2p",
        needs=("cp",),
    ),
    _layout("data parallelism", dp1="", dp=_sizes("", "dp", 2, 3, 4, 8)),
    _layout("pipeline parallelism", pp1="", pp=_sizes("--pipeline-model-parallel-size", "pp", 2, 4)),
    _layout(
        "pipeline schedule",
        Feature(ONE_CHUNK),
        *(
            Feature(
                word_of_schedule(name),
                flags_of_schedule(name),
                needs=("pp",),
                excludes=() if traits.overlaps_passes else ("moeoverlap",),
            )
            for name, traits in PIPELINE_SCHEDULES.items()
            if name != ONE_CHUNK
        ),
    ),
    _layout(
        "pipeline communication", postsreceives="", noposts="--no-overlap-p2p-communication", needs=("pp",)
    ),
    _layout(
        "pipeline split",
        equalstages="",
        balanced="--pipeline-model-parallel-layout auto",
        unevenstages={
            "uneven2": "--pipeline-model-parallel-layout Ettt|tL",
            "uneven4": "--pipeline-model-parallel-layout E|tt|t|tL",
            "mtpalone": "--pipeline-model-parallel-layout Ett|tt|mm|L",
        },
        needs=("pp",),
    ),
    _layout("rank order", dpfirst="", ppfirst="--use-tp-pp-dp-mapping", needs=("pp",)),
    _layout(
        "sharding over replicas",
        Feature("zero0", "--no-use-distributed-optimizer", excludes=("instances",)),
        Feature("zero1", "--use-distributed-optimizer"),
        Feature("zero2", "--data-parallel-sharding-strategy optim_grads"),
        Feature("zero3", "--data-parallel-sharding-strategy optim_grads_params"),
        needs=_REPLICAS,
    ),
    _layout(
        "optimizer instances",
        oneinstance="",
        instances=_sizes("--num-distributed-optimizer-instances", "instances", 2),
        needs=_REPLICAS,
    ),
    _layout(
        "overlap",
        nooverlap="--no-overlap-grad-reduce --no-overlap-param-gather",
        overlap="--overlap-grad-reduce --overlap-param-gather",
        overlapgrads="--overlap-grad-reduce --no-overlap-param-gather",
        overlapweights="--no-overlap-grad-reduce --overlap-param-gather",
        needs=_REPLICAS,
    ),
    _layout(
        "recomputation",
        Feature("norecompute"),
        Feature("chunkedmlp", "--mlp-chunks-for-training 3", excludes=("tpoverlap",)),
        Feature(
            "uniform", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3"
        ),
        Feature("block", "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
        Feature(
            "selective",
            {
                "selective": "--recompute-granularity selective --recompute-modules core_attn mlp",
                "recomputenorms": "--recompute-granularity selective --recompute-modules core_attn layernorm",
                "recomputelatents": "--recompute-granularity selective --recompute-modules mla_up_proj",
            },
        ),
        Feature(
            "recomputeexperts",
            {
                "recomputemoe": "--recompute-granularity selective --recompute-modules moe core_attn",
                "recomputeshared": "--recompute-granularity selective --recompute-modules shared_experts moe_act",
            },
            needs=("experts",),
        ),
    ),
    _layout(
        "activations",
        Feature("keepactivations"),
        Feature("offloadlayers", f"--cpu-offloading-num-layers 3 {_ANY_SIZE}"),
        Feature(
            "offloadmodules", f"{_MODULES} attn_norm core_attn attn_proj mlp_norm expert_fc1 {_ANY_SIZE}"
        ),
        Feature("offloadqkv", f"{_MODULES} qkv_linear {_ANY_SIZE}"),
        Feature("offloadinputs", f"{_MODULES} layer_input {_ANY_SIZE}", needs=("uniform", "block")),
    ),
    _option(
        "experts",
        dense="",
        experts={
            "mixtral": "--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 48 --moe-router-topk 2",
            "deepseek": (
                "--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 24 --moe-layer-freq [0]+[1]*3"
                " --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2"
                " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
                " --moe-router-bias-update-rate 0.1 --moe-router-topk-scaling-factor 2.5"
                " --moe-shared-expert-intermediate-size 48"
            ),
            "qwenmoe": (
                "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq 2"
                " --moe-router-topk 1 --moe-router-pre-softmax --moe-input-jitter-eps 0.05"
                " --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate"
            ),
            "latentexperts": (
                "--disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1]*2"
                " --moe-router-topk 3 --moe-latent-size 24 --moe-shared-expert-intermediate-size 24"
            ),
            "biasedexperts": (
                "--no-disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2"
                " --moe-shared-expert-intermediate-size 24"
            ),
        },
    ),
    _layout(
        "expert parallelism",
        ep1="",
        ep=_sizes("--expert-model-parallel-size", "ep", 2, 4),
        needs=("experts",),
    ),
    _layout(
        "expert tensor parallelism",
        etp1="--expert-tensor-parallel-size 1",
        etp=_sizes("--expert-tensor-parallel-size", "etp", 2),
        needs=("experts",),
    ),
    _layout(
        "dispatcher",
        alltokens="",
        scarce="--moe-expert-rank-capacity-factor 0.5",
        alltoall="--moe-token-dispatcher-type alltoall --no-moe-alltoall-as-allgather",
        hosts="--moe-token-dispatcher-type alltoall --no-moe-alltoall-as-allgather --moe-alltoall-ranks-per-host 2",
        needs=("ep",),
    ),
    _layout(
        "expert communication",
        moewaits="",
        moeoverlap="--overlap-moe-expert-parallel-comm",
        needs=("ep", "etp"),
    ),
    _option(
        "balancing",
        unbalanced="",
        auxloss="--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
        seqauxloss="--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        globalauxloss="--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        severallosses="--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss"
        " --moe-aux-loss-coeff 0.1 0.2 0.05",
        sinkhorn="--moe-router-load-balancing-type sinkhorn",
        quantiles="--moe-router-load-balancing-type quantile_balancing --moe-router-quantile-balancing-ema 0.3",
        needs=("experts",),
    ),
    _option(
        "capacity",
        dropless="",
        capacity={
            "dropping": "--moe-expert-capacity-factor 0.8",
            "dropspadded": (
                "--moe-expert-capacity-factor 1.1 --moe-token-drop-policy position"
                " --moe-pad-expert-input-to-capacity"
            ),
        },
        needs=("experts",),
    ),
    _option("embeddings", untied="--untie-embeddings-and-output-weights", tied=""),
    _option("documents", whole="", documents="--reset-attention-mask --reset-position-ids"),
    _option(
        "attention dropout",
        noattentiondropout="--attention-dropout 0",
        attentiondropout="--attention-dropout 0.1",
    ),
    _option("loss", means="", tokens="--calculate-per-token-loss"),
    _option("z-loss", nozloss="", zloss="--z-loss-coeff 0.01"),
    _option(
        "multi-token prediction",
        Feature("onetoken"),
        Feature(
            "mtp",
            {
                "mtp1": "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3",
                "mtp2": "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5",
            },
        ),
        Feature(
            "mtprepeated",
            "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --mtp-use-repeated-layer",
            excludes=("globalauxloss", "severallosses"),
        ),
    ),
    _option(
        "distillation",
        Feature("noteacher"),
        Feature(
            "teacher",
            {
                "teacher": "--export-kd-teacher-load drawn --kd-temperature 2 --no-kd-skip-lm-loss --kd-layer-pairs final:final",
                "reverseteacher": (
                    "--export-kd-teacher-load drawn --kd-loss reverse_kl --kd-temperature 0.7 --no-kd-skip-lm-loss"
                    " --no-kd-balance-losses --kd-loss-scale 3"
                ),
            },
            excludes=tuple(
                word_of_schedule(name) for name, traits in PIPELINE_SCHEDULES.items() if traits.is_v
            ),
        ),
        Feature(
            "matchedlayers",
            "--export-kd-teacher-load drawn --kd-layer-pairs 0:2:mse 2:5:cosine final:final:mse",
            needs=("pp1",),
        ),
    ),
    _option("loss scale", noscale="", scale="--loss-scale 30000"),
    _option(
        "optimizer",
        Feature("adam", "--optimizer adam"),
        Feature("sgd", "--optimizer sgd"),
        Feature("lion", "--optimizer lion"),
        Feature(
            "muon",
            {
                "muon": "--optimizer muon --muon-nesterov",
                "muonjoint": "--optimizer muon --muon-no-split-qkv",
                "adaptivemuon": "--optimizer adaptive_muon --adaptive-muon-eps 1e-3",
            },
            excludes=("offload",),
        ),
        Feature(
            "soap",
            "--optimizer soap --soap-precondition-frequency 2 --adam-eps 1e-2",
            excludes=("offload",),
        ),
    ),
    _layout(
        "optimizer state", ondevice="", offload="--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    ),
    _option("learning rate", onerate="", tworates="--decoupled-lr 3e-3"),
    _option("clipping", clip="--clip-grad 0.5", noclip="--clip-grad 0"),
    _option(
        "attention logits", unclipped="", qkclip="--qk-clip --qk-clip-threshold 1e-3 --qk-clip-alpha 0.3"
    ),
)

_DYNAMIC_PACKS: Final = (
    "--pack-documents --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 12 --cp-comm-type"
)
PACKS: Final = _layout(
    "packs",
    unpacked="",
    packs={
        "packs": f"{_DYNAMIC_PACKS} a2a",
        "packsgather": f"{_DYNAMIC_PACKS} all_gather",
        "fixedpacks": "--pack-documents --cp-comm-type a2a",
        "firstfit": "--pack-documents --cp-comm-type a2a --sequence-packing-scheduler first_fit",
    },
    needs=("tokens",),
)
"""Documents are the samples up to their last token that counts. They are combined with little else: `PACKED_ROWS` has the rows."""

ADAPTERS: Final = _option(
    "adapters",
    noadapters="",
    lora={
        "lora": "--lora-rank 3 --lora-dropout 0.1",
        "somelora": "--lora-rank 2 --lora-alpha 5 --lora-target-modules q_proj o_proj up_proj",
    },
)
"""They leave all other weights frozen: `ADAPTER_ROWS` has the rows, and real runs draw them."""

FP8_MODULES: Final = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  tensorwise: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: tensorwise}}
  blockwise: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: blockwise}}
matchers:
  projections: {type: glob, enabled: true, pattern: "*.self_attention.linear_*proj", config: bf16}
  mlp: {type: glob, enabled: true, pattern: "*.layers.[13].mlp.*", config: tensorwise}
  layer: {type: glob, enabled: true, pattern: "*.layers.2.*", config: blockwise}
"""
"""The file of a row with --te-precision-config-file; other linear layers have the recipe of the flags."""

NUMBER_FORMATS: Final[tuple[Option, ...]] = (
    _option(
        "FP8",
        nofp8="",
        fp8={
            "fp8tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
            "fp8delayed": "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --fp8-margin 1",
            "fp8bf16wgrad": "--fp8-format e4m3 --fp8-recipe tensorwise --no-fp8-wgrad",
            "fp8blockwise": "--fp8-format e4m3 --fp8-recipe blockwise --fp8-block-size 4",
            "fp8e4m3": "--fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16",
            "nvfp4": "--fp4-format e2m1",
            "fp8dispatch": "--fp8-format hybrid --fp8-recipe tensorwise --moe-fp8-dispatch",
            "fp8gather": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
            "fp8delayedgather": (
                "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max --fp8-margin 1"
                " --fp8-param-gather"
            ),
            "fp8modules": "--fp8-format hybrid --fp8-block-size 4 --te-precision-config-file fp8_modules.yaml",
        },
    ),
    _option("gradient reduction dtype", sumsfp32="", sumsbf16="--grad-reduce-in-bf16", needs=_REPLICAS),
    _option(
        "moments",
        momentsfp32="",
        momentsbf16="--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        needs=("adam", "lion", "muon"),
    ),
    _option("average of weights", unaveraged="", ema="--ema-decay 0.5 --eval-with-ema"),
    _option(
        "Muon matmul precision",
        muonbf16="",
        muonfp32={"muontf32": "--muon-fp32-matmul-prec high", "muonfp32": "--muon-fp32-matmul-prec highest"},
        needs=("muon",),
    ),
    _option(
        "router dtype",
        routersdefault="",
        routershigh={"routersfp32": "--moe-router-dtype fp32", "routersfp64": "--moe-router-dtype fp64"},
        needs=("experts",),
    ),
)
"""They change results by rounding. fp64 rows leave them out; low-precision rows are compared with a noise level that includes them."""
