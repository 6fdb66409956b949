"""Rules about the samples of BERT and T5."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.schema.tree import flag_of

Problems = Iterator[Problem]

_SHORTEST: Final = {"bert": 5, "t5": 4}
"""Fewest tokens of a sample: two of text, and the special ones."""


def sentences_come_from_files(draft: Draft) -> Problems:
    """Name the settings that give other data than documents of sentences."""
    family, data = draft.config.model.model_family, draft.config.data
    if family == "gpt":
        return
    reasons = {
        "mock_data": "has no sentences",
        "dataset": "returns samples of a GPT",
        "sft": "reads conversations, which samples of a GPT hold",
        "reset_attention_mask": "confines attention to documents, and a sample has one document",
        "dataloader_inter_document_masking": "confines attention to sequences, and a sequence is a sentence",
    }
    for name, reason in reasons.items():
        if getattr(data, name):
            yield Problem(
                f"{flag_of(name)} {reason}, and --model-family {family} masks sentences of documents",
                f"remove {flag_of(name)}, and name data of preprocess_data.py --split-sentences with --data-path",
            )


def samples_hold_text(draft: Draft) -> Problems:
    family, length = draft.config.model.model_family, draft.config.data.seq_length
    if length < _SHORTEST.get(family, 0):
        yield Problem(
            f"--seq-length {length} is too short for samples of --model-family {family}, which have special tokens",
            f"use --seq-length {_SHORTEST[family]} or more",
        )


def decoder_has_a_length(draft: Draft) -> Problems:
    model = draft.config.model
    if model.model_family == "t5" and model.decoder_seq_length is None:
        yield Problem(
            "--model-family t5 needs --decoder-seq-length, the length of the masked spans",
            "add --decoder-seq-length, such as a quarter of --encoder-seq-length",
        )


MASKED_SAMPLE_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    sentences_come_from_files,
    samples_hold_text,
    decoder_has_a_length,
)
