"""Samples of a dataset that a command computes a trained model on: to measure its parts, or the inputs of its layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.reader import TensorReader
from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.data.indexed.reader import IndexedDataset, read_description

_REMEDY = "tokenize the dataset with the tokenizer of the model"


def read_samples(
    prefix: str, reader: TensorReader, *, flag: str, remedy: str, count: int, length: int, vocab_size: int
) -> Tensor:
    """Return samples of consecutive tokens, at equal distances over a dataset: int64 [count, length].

    Args:
        reader: of the model.
        flag: names the dataset, for messages.
        remedy: makes the set smaller.

    Raises:
        InputError: the dataset is too short, or has other tokens than the model.
    """
    dataset = IndexedDataset(prefix)
    if dataset.dtype.kind not in "iu":
        raise InputError(f"{flag} {prefix} has no tokens", fix="name a dataset of tokens")
    if dataset.num_tokens < count * length:
        raise InputError(
            f"{flag} {prefix} has {dataset.num_tokens} tokens, and {count} samples of {length} are {count * length}",
            fix=f"{remedy}, or name a longer dataset",
        )
    fingerprint = reader.manifest.state["tokenizer_fingerprint"]
    stored = (read_description(prefix) or {}).get("tokenizer_fingerprint")
    if fingerprint is not None and stored is not None and not is_same_tokenizer(fingerprint, stored):
        raise InputError(
            f"{flag} {prefix} was made with another tokenizer than that of the model", fix=_REMEDY
        )
    size = dataset.dtype.itemsize
    starts = np.linspace(0, dataset.num_tokens - length, count).astype(np.int64)
    rows = [dataset.read_bytes(int(start) * size, length * size).view(dataset.dtype) for start in starts]
    samples = torch.from_numpy(np.stack(rows).astype(np.int64))
    if int(samples.min()) < 0 or int(samples.max()) >= vocab_size:
        raise InputError(
            f"{flag} {prefix} has the token {int(samples.max())}, and the model has {vocab_size}", fix=_REMEDY
        )
    return samples
