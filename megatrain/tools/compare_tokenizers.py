"""The tokenizer of an exported folder in transformers, compared with the tokenizer of the run on sample texts."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.config.errors import MegatrainError
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.data.tokenizers.identity import sample_texts

_FIX = (
    "export the weights alone (megatrain checkpoint export-weights), and report the type of the tokenizer and this"
    " message"
)
_MOST_SHOWN = 60


def compare_tokenizers(files: Mapping[str, bytes], tokenizer: Tokenizer, *, num_rows: int) -> str:
    """Return a sentence about the comparison.

    Args:
        files: names and contents of the folder's files other than weights.
        tokenizer: tokenizer of the run.
        num_rows: rows of the embedding.

    Raises:
        MegatrainError: AutoTokenizer encodes or decodes a text otherwise, or has more tokens than there are rows.
    """
    if find_spec("transformers") is None:
        return "the tokenizer was not compared: the package transformers is not installed (pip install transformers)"
    theirs = _auto_tokenizer(files)
    if len(theirs) > num_rows:
        raise MegatrainError(
            f"the exported tokenizer has {len(theirs)} tokens in transformers, and the embedding {num_rows} rows",
            fix=_FIX,
        )
    texts = list(sample_texts(theirs.get_added_vocab()))
    for text in texts:
        ids, found = tokenizer.encode(text), list(theirs(text)["input_ids"])
        if found != ids:
            raise MegatrainError(
                f"the exported tokenizer differs: the text {text!r} has the ids {_shown(found)} in transformers, and"
                f" {_shown(ids)} in this run",
                fix=_FIX,
            )
        if theirs.unk_token_id in ids:  # which each library shows in its own way
            continue
        expected, decoded = tokenizer.decode(ids), theirs.decode(ids, skip_special_tokens=False)
        if decoded != expected:
            raise MegatrainError(
                f"the exported tokenizer differs: the ids of the text {text!r} are decoded to {decoded!r} in"
                f" transformers, and to {expected!r} in this run",
                fix=_FIX,
            )
    return f"the tokenizer gives the same ids in transformers, for {len(texts)} texts"


def _auto_tokenizer(files: Mapping[str, bytes]) -> Any:
    """Return the tokenizer that transformers reads; no code of the files runs."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415 (optional)

        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def _shown(ids: list[int]) -> str:
    return str(ids) if len(ids) <= _MOST_SHOWN else f"{ids[:_MOST_SHOWN]} and {len(ids) - _MOST_SHOWN} more"
