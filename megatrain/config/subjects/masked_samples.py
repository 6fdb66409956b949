"""The samples of BERT and T5: sentences of documents, with masked words."""

from __future__ import annotations

from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.registry import Problems, rule

_SHORTEST: Final = {"bert": 5, "t5": 4}
"""Fewest tokens of a sample: two of text, and the special ones."""


@rule
def samples_are_masked_sentences(draft: Draft) -> Problems:
    family, dataset = draft.config.model.model_family, draft.config.data.dataset
    if family != "gpt" and dataset is not None:
        yield Problem(
            f"--dataset {dataset} returns samples of a GPT, and --model-family {family} masks sentences of documents",
            "remove --dataset, and name data of preprocess_data.py --split-sentences with --data-path",
        )


@rule
def samples_hold_text(draft: Draft) -> Problems:
    family, length = draft.config.model.model_family, draft.config.data.seq_length
    if length < _SHORTEST.get(family, 0):
        yield Problem(
            f"--seq-length {length} is too short for samples of --model-family {family}, which have special tokens",
            f"use --seq-length {_SHORTEST[family]} or more",
        )
