"""Options of real runs: the words of parity's table, and those that only a whole run has.

A word is a value of an option, with its flags. `{data}` stands for the folder of the datasets (corpus.py).
"""

from __future__ import annotations

from typing import Final

from megatrain.data.tokenizers.vocabularies import NUM_CASED_SENTINELS
from megatrain.tools.parity.features import ADAPTERS
from megatrain.tools.parity.features import OPTIONS as FEATURE_OPTIONS
from megatrain.tools.parity.measure import LOW_PRECISIONS, PRECISION_FLAGS
from megatrain.tools.parity.models import MODELS

BASE: Final = (
    "--num-layers 4 --num-attention-heads 48 --hidden-size 48 --kv-channels 4 --ffn-hidden-size 96 --init-method-std 0.1"
    " --max-position-embeddings 64 --seq-length 24 --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2"
    " --global-batch-size 8 --lr 3e-3 --adam-eps 1e-6 --eval-iters 0 --params-dtype float64 --device cpu --log-interval 1"
    " --make-vocab-size-divisible-by 1 --require-parity"
)
"""Flags of every run. The ids are spread over all tensor-parallel ranks; Adam's eps is large, so that a gradient that is only rounding error moves no weight by a multiple of it."""

SENTENCES: Final = "sentences"
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_PIECES: Final = (*SPECIAL, *"abcdefghijklmnop", *(f"##{letter}" for letter in "abcdefgh"))
"""The vocabulary of the sentences."""
_DATA = "--data-path {data}/alike --split 80,15,5"
_VALID = "--train-data-path {data}/alike --valid-data-path"
ALWAYS: Final[dict[str, dict[str, str]]] = {
    "model": MODELS,
    "data": {
        "indexed": _DATA,
        "mock": "--mock-data",
        "blend": "--data-path 0.7 {data}/alike 0.3 {data}/varied --split 80,15,5",
        "heldout": f"{_VALID} {{data}}/held",
        "validsets": f"{_VALID} {{data}}/held {{data}}/varied --full-validation --multiple-validation-sets",
        "packed": (
            f"{_DATA} --pack-documents --micro-batch-size 1 --calculate-per-token-loss --attention-dropout 0"
            " --dynamic-context-parallel --cp-comm-type all_gather"
        ),
        SENTENCES: (
            "--data-path {data}/sentences --split 80,15,5 --tokenizer-type BertWordPieceCase --vocab-file {data}/vocab.txt"
            f" --vocab-size {len(WORD_PIECES) + NUM_CASED_SENTINELS}"
        ),
    },
    "length": {
        "iterations4": "--train-iters 4",
        "samples35": "--train-samples 35",
        "ramp": "--train-samples 40 --rampup-batch-size 4 4 16",
        "steps": "--train-samples 40 --global-batch-size auto --step-batch-size-schedule 0:4,192:8",
        "pieces": "--train-iters 4 --seq-length-schedule 0:12,384:24",
    },
    "batch": {
        "batch8": "",
        "batch12": "--global-batch-size 12",
        "micro1": "--micro-batch-size 1",
        "micro4": "--micro-batch-size 4 --global-batch-size 16",
    },
}
"""Each run has a word of each of these options; a run that names none has the first, or `sentences`, which other families than
GPT read."""

_SINGLE: Final[dict[str, dict[str, str]]] = {
    "end of document": {
        "maskends": "--eod-mask-loss",
        "storeddocuments": "--dataloader-inter-document-masking",
        "resetpositions": "--reset-position-ids",
    },
    "evaluation": {
        "evaluates": "--eval-iters 2 --eval-interval 2",
        "evalstart": "--eval-iters 1 --eval-interval 3 --eval-at-start",
        "fullvalidation": "--full-validation --eval-interval 2",
        "evalbatch": "--eval-iters 2 --eval-interval 2 --eval-global-batch-size 16",
        "evalmicro": "--eval-iters 2 --eval-interval 2 --eval-micro-batch-size 1",
    },
    "schedule": {
        "constant": "--lr-decay-style constant --lr-warmup-fraction 0.3",
        "cosine": "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 1",
        "wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style cosine",
        "inversesqrt": "--lr-decay-style inverse-square-root --lr-warmup-iters 1 --lr-warmup-init 1e-4",
    },
    "weight decay": {
        "nodecay": "--weight-decay 0",
        "decaygrows": "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.3",
    },
    "size": {
        "layers2": "--num-layers 2",
        "layers5": "--num-layers 5",
        "long": "--seq-length 48",
        "odd": "--seq-length 20",
    },
    "query groups": {
        f"queries{groups}": f"--group-query-attention --num-query-groups {groups}" for groups in (2, 12)
    },
    "window": {
        "window": "--window-size 5,0",
        "somewindows": "--window-size 6,0 --window-attn-skip-freq 2",
    },
    "norms": {
        "qknorm": "--qk-layernorm",
        "qkl2norm": "--qk-l2-norm",
        "rmsnorm": "--normalization RMSNorm",
        "bothnorms": "--norm-position both",
    },
    "residual": {"parallelresidual": "--use-parallel-residual"},
    "activation": {"swiglu": "--swiglu", "squaredrelu": "--squared-relu", "geglu": "--geglu"},
    "position": {"nope": "--no-rope-freq 2", "halfrope": "--rotary-percent 0.5"},
    "softmax": {
        "sinks": "--softmax-type learnable",
        "offbyone": "--softmax-type off-by-one",
        "softcap": "--attn-logit-softcapping 2",
    },
    "gate": {"outputgate": "--attention-output-gate"},
    "dropout": {
        "hiddendropout": "--hidden-dropout 0.2",
        "nodropout": "--hidden-dropout 0 --attention-dropout 0",
    },
    "router": {
        "sigmoid": "--moe-router-score-function sigmoid",
        "presoftmax": "--moe-router-pre-softmax",
        "jitter": "--moe-input-jitter-eps 0.1",
        "scaledtopk": "--moe-router-topk-scaling-factor 1.5",
        "bias": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "routerfp64": "--moe-router-dtype fp64",
    },
    "momentum": {
        "betas": "--adam-beta1 0.8 --adam-beta2 0.95",
        "heavysgd": "--optimizer sgd --sgd-momentum 0.5",
    },
    "log": {
        "paramsnorm": "--log-params-norm",
        "zeros": "--log-num-zeros-in-grad",
        "layerlog": "--moe-per-layer-logging",
    },
    ADAPTERS.name: {word: flags for word, flags in ADAPTERS.words().items() if flags},
    "rounding": {"qatint8": "--qat int8", "qatint4": "--qat int4 --qat-group-size 4"},
    "average": {"averages": "--ema-decay 0.5", "evalaverages": "--ema-decay 0.5 --eval-with-ema"},
    "save interval": {"savesoften": "--save-interval 1"},
    "skipped": {"skipsiteration": "--iterations-to-skip 2"},
    "seed": {"otherseed": "--seed 7"},
}
_OF_LAYOUT: Final[dict[str, dict[str, str]]] = {
    "save": {"asyncsave": "--async-save"},
    "workers": {"noworkers": "--num-workers 0"},
    "restart": {"resumes": "", "fromone": "", "toone": ""},
    "loss chunks": {"chunkedloss": ""},
    "dtype": dict.fromkeys(LOW_PRECISIONS, ""),
}
"""Options of the layout's run alone. `resumes`: it stops after two iterations and resumes; `fromone`: its first part runs in one
process; `toone`: its second part does. `chunkedloss`: the loss is computed in chunks of a few tokens, as with a large vocabulary.
A number format is compared bit by bit with the same layout that was not stopped (`DTYPES`)."""

DTYPES: Final[dict[str, str]] = {name: PRECISION_FLAGS[name] for name in LOW_PRECISIONS}

_ADDED = {**ALWAYS, **_SINGLE, **_OF_LAYOUT}
OPTIONS: Final[dict[str, dict[str, str]]] = {
    **{option.name: dict(option.words()) for option in FEATURE_OPTIONS},
    **_ADDED,
}
"""Words by option, with their flags. A word of parity's table that is the first of its option is the default of the program, or is
given like any other word."""
IS_LAYOUT: Final = {option.name for option in FEATURE_OPTIONS if option.is_layout} | _OF_LAYOUT.keys()
OPTION_OF: Final = {word: option for option, words in OPTIONS.items() for word in words}
SIZES: Final = ("tensor parallelism", "context parallelism", "data parallelism", "pipeline parallelism")
"""Options whose numbers multiply to the number of ranks."""
