"""Files of a tokenizer in a folder of transformers: AutoTokenizer reads them to the ids of the run's tokenizer.

tokenizer.json           what the run's tokenizer does, for each tokenizer type
tokenizer_config.json    the class that reads it as it is, names of special tokens, and what does not affect ids
chat_template.jinja      that of the training (--sft), or copied; a template in tokenizer_config.json then stays there
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from megatrain.checkpoint.checked_files import read_small_file
from megatrain.checkpoint.stored_tokenizer import StoredTokenizer
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.files import read_json, tokenizer_folder
from megatrain.interop.hf.folder import TOKENIZER_NAME

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MAX_FILE_BYTES: Final = 1 << 28
_CLASS: Final = "PreTrainedTokenizerFast"
"""The class that takes a tokenizer.json as it is: others make the normalizer or the template anew."""
_KEPT: Final = (
    "chat_template", "model_max_length", "padding_side", "truncation_side", "model_input_names",
    "extra_special_tokens", "additional_special_tokens",
)  # fmt: skip
"""Keys of a tokenizer_config.json that do not affect ids, once all tokens that it names are in tokenizer.json."""


def tokenizer_files(stored: StoredTokenizer) -> dict[str, bytes]:
    """Return names and contents of the files; none if the tokenizer has no text.

    Raises:
        InputError: transformers has no such tokenizer, or a file is damaged.
    """
    found = stored.tokenizer.to_hf()
    if found is None:
        return {}
    keys = {
        **dict(_kept(stored.config)),
        **found.roles,
        "tokenizer_class": _CLASS,
        "clean_up_tokenization_spaces": False,
        **({} if found.matches_special else {"split_special_tokens": True}),
    }
    if stored.chat_template is not None:  # of two templates, transformers reads the file
        keys.pop("chat_template", None)
    return {TOKENIZER_NAME: found.definition, TOKENIZER_CONFIG: json_bytes(keys), **dict(_template(stored))}


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _kept(config: TokenizerConfig) -> Iterator[tuple[str, Any]]:
    folder = tokenizer_folder(config)
    if folder is None or not (folder / TOKENIZER_CONFIG).is_file():
        return
    content = read_json(folder / TOKENIZER_CONFIG)
    yield from ((name, content[name]) for name in _KEPT if isinstance(content, dict) and name in content)


def _template(stored: StoredTokenizer) -> Iterator[tuple[str, bytes]]:
    folder = tokenizer_folder(stored.config)
    if stored.chat_template is not None:
        yield CHAT_TEMPLATE, stored.chat_template.encode()
    elif folder is not None and (folder / CHAT_TEMPLATE).is_file():
        yield CHAT_TEMPLATE, read_small_file(folder / CHAT_TEMPLATE, max_bytes=MAX_FILE_BYTES)
