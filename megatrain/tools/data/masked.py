"""The text of a sample of BERT or T5 in `megatrain data sample`: what the model reads, and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatrain.data.samples.dataset import FamilySample, TokenSpan
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.tools.data.inspect import printable

Arrays = Mapping[str, npt.NDArray[Any]]


def described_masked(sample: FamilySample, spans: list[TokenSpan], tokenizer: Tokenizer) -> str:
    """Return the sentences of a sample, its texts and its labels, without padding."""
    arrays = sample.arrays
    lines = _bert(arrays, tokenizer) if "text" in arrays else _t5(arrays, tokenizer)
    first, last = spans[0], spans[-1]
    where = f"{first.source.removesuffix('.bin')}, document {first.document}, sentences {first.sequence} to {last.sequence}"
    cut = ", cut to the length of the sample" if arrays["truncated"] else ""
    return "\n".join([*lines, "", f"{where}{cut}"])


def _bert(arrays: Arrays, tokenizer: Tokenizer) -> list[str]:
    length = _length(arrays["text"])
    masked = np.flatnonzero(arrays["loss_mask"])
    types = arrays["types"][:length]
    lines = [f"tokens         {length:,} of {len(arrays['text']):,}; loss on {len(masked):,}"]
    if types.any():
        order = "swapped" if arrays["is_random"] else "in order"
        lines.append(f"two texts      {order}; the second starts at token {int(np.argmax(types))}")
    lines += ["", printable(tokenizer.decode(arrays["text"][:length].tolist())), ""]
    for position in masked.tolist():
        shown, label = (tokenizer.decode([int(arrays[name][position])]) for name in ("text", "labels"))
        lines.append(f"token {position}: {shown} is {label}")
    return lines


def _t5(arrays: Arrays, tokenizer: Tokenizer) -> list[str]:
    read, predicted = int(arrays["enc_mask"].sum()), int(arrays["loss_mask"].sum())
    lines = [
        f"encoder        {read:,} tokens of {len(arrays['text_enc']):,}",
        f"decoder        {predicted:,} tokens of {len(arrays['text_dec']):,}; loss on all",
    ]
    for name, count in (("text_enc", read), ("labels", predicted)):
        lines += ["", printable(tokenizer.decode(arrays[name][:count].tolist()))]
    return lines


def _length(ids: npt.NDArray[Any]) -> int:
    """Return the tokens before the padding, which has id 0; a text ends with another one."""
    used = np.flatnonzero(ids)
    return int(used[-1]) + 1 if len(used) else 0
