"""Tokenizers of the `tokenizers` library: HuggingFaceTokenizer, GPT2BPETokenizer and the two BertWordPiece types.

    tokenizer.json             ─┐  (with the files beside it: `tokenizer_named`)
    vocab.json + merges.txt    ─┼─> the library's tokenizer + {"eos_token": "</s>", ...} ──> LibraryTokenizer
    vocab.txt                  ─┘

No code of a tokenizer's folder is run, and nothing is looked up on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.files import NO_PAD, Kind, fingerprint_of, kind_of, read_file, read_json
from megatrain.data.tokenizers.special_tokens import NamedTokens, named_tokens, require_named, use_named
from megatrain.data.tokenizers.vocabularies import byte_level_bpe, word_pieces

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Looked for, in this order, where no file names the token; `note` says which was found."""
OTHER_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. The text of a special token becomes that token."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        config: TokenizerConfig,
        *,
        named: Mapping[str, str],
        definition: dict[str, Any],
    ) -> None:
        """Finish a tokenizer.

        The end of a document is the `eos_token`; without one, the `sep_token`, as in Megatron-LM; where neither is
        named, the first of `END_OF_DOCUMENT` in the vocabulary, if any: Megatron-LM would have none.

        Args:
            named: text of tokens by their role, such as `eos_token`; a role of one outside the vocabulary stays empty.
            definition: all that ids depend on, for the fingerprint.
        """
        self._library = library
        adds_tokens = library.num_special_tokens_to_add(is_pair=False) > 0
        self._with_template = adds_tokens and not config.tokenizer_hf_no_include_special_tokens
        if config.tokenizer_special_tokens:
            library.add_special_tokens(list(config.tokenizer_special_tokens))
            definition = definition | {"added_special_tokens": list(config.tokenizer_special_tokens)}
        if self._with_template:
            definition = definition | {"with_template": True}
        self.fingerprint = fingerprint_of(definition)
        ids = library.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1  # not their number: there may be gaps
        by_role = {role: library.token_to_id(token) for role, token in named.items()}
        is_named = "eos_token" in named or "sep_token" in named
        guess = None if is_named else next(filter(self._has, END_OF_DOCUMENT), None)
        self.eod = by_role.get("eos_token" if "eos_token" in named else "sep_token")
        self.note: str | None = None
        if guess is not None:
            self.eod = library.token_to_id(guess)
            self.note = (
                f"no file of the tokenizer names an eos_token: {guess} (id {self.eod}) is taken to end documents."
                f' {{"eos_token": "{guess}"}} in tokenizer_config.json would say so'
            )
        special = (self.eod, *(by_role.get(role) for role in OTHER_SPECIAL))
        self.special_ids = frozenset(number for number in special if number is not None)
        pad = by_role.get("pad_token")
        self.pad = NO_PAD if pad is None else pad

    def _has(self, token: str) -> bool:
        return self._library.token_to_id(token) is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._library.encode(text, add_special_tokens=self._with_template).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts."""
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=self._with_template)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._library.decode(list(ids), skip_special_tokens=False))


def load_huggingface(config: TokenizerConfig) -> LibraryTokenizer:
    """A tokenizer.json, or a folder with one; the files beside it name tokens, all of which it must have.

    A folder of GPT-2's older form, with vocab.json and merges.txt alone, is read as GPT2BPETokenizer reads it.
    """
    path = Path(config.tokenizer_model or "")
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        _check_there(path)
        if not _is_older_gpt2(path):
            raise InputError(f"{path}: holds no tokenizer.json", fix=_fix_of_folder(path))
        files = path / "vocab.json", path / "merges.txt"
        return _byte_level(config, *files, {"eos_token": "<|endoftext|>"}, named_tokens(path))
    definition: dict[str, Any] = read_file(file, Kind.TOKENIZER_JSON, flag="--tokenizer-model").data
    library = _made(file)
    # A file may ask for cutting and filling up, which belongs to inference and would damage documents.
    library.no_truncation()
    library.no_padding()
    padding = definition.get("padding")
    definition.update(truncation=None, padding=None)
    named = named_tokens(folder, taken=library.get_added_tokens_decoder())
    _require_named(named, library, file)
    changed = use_named(library, named)
    if changed:
        definition["named_tokens"] = changed
    filler = {"pad_token": padding["pad_token"]} if isinstance(padding, dict) else {}
    return LibraryTokenizer(library, config, named={**filler, **named.roles}, definition=definition)


def load_gpt2_bpe(config: TokenizerConfig) -> LibraryTokenizer:
    """GPT-2's byte-level pairs: --vocab-file and --merge-file. <|endoftext|> ends documents."""
    files = Path(config.vocab_file or ""), Path(config.merge_file or "")
    return _byte_level(config, *files, {"eos_token": "<|endoftext|>"})


def load_bert(config: TokenizerConfig) -> LibraryTokenizer:
    """BERT's word pieces: --vocab-file. [SEP] ends documents, as in Megatron-LM."""
    file = read_file(Path(config.vocab_file or ""), Kind.TEXT, flag="--vocab-file")
    lowercase = config.tokenizer_type == "BertWordPieceLowerCase"
    pieces = word_pieces(file, lowercase=lowercase)
    return LibraryTokenizer(pieces.library, config, named=pieces.named, definition=pieces.definition)


def _byte_level(
    config: TokenizerConfig,
    vocab: Path,
    merges: Path,
    roles: Mapping[str, str],
    named: NamedTokens | None = None,
) -> LibraryTokenizer:
    """GPT-2's byte-level pairs.

    Args:
        roles: text of tokens by role, where no file names another.
        named: what the files beside the vocabulary say.
    """
    roles = {**roles, **(named.roles if named else {})}
    more = [token.text for token in (*named.registered, *named.mentioned)] if named else []
    pairs = byte_level_bpe(
        read_file(vocab, Kind.VOCAB_JSON, flag="--vocab-file"),
        read_file(merges, Kind.MERGES, flag="--merge-file"),
        special=sorted({*roles.values(), *more}),
    )
    if named:
        _require_named(named, pairs.library, vocab)
    return LibraryTokenizer(pairs.library, config, named=roles, definition=pairs.definition)


def _require_named(named: NamedTokens, library: tokenizers.Tokenizer, file: Path) -> None:
    fix = f"correct the names, or write the tokens into it with transformers: {_saving_anew(file.parent)}"
    require_named(named, lambda token: library.token_to_id(token) is not None, file=file, fix=fix)


def _made(file: Path) -> tokenizers.Tokenizer:
    import tokenizers  # noqa: PLC0415 - loading the library takes a while, and most processes need no tokenizer

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(
            f"{file}: not a tokenizer of the `tokenizers` library: {error}",
            fix="a newer library may know it (pip install -U tokenizers); or make it again with transformers'"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        ) from error


def _check_there(path: Path) -> None:
    if path.exists():
        return
    fix = "give --tokenizer-model a tokenizer.json or a folder with one"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and path.suffix not in {".json", ".model"}:
        fix += (
            f"; a model's name on the hub is not looked up: download it first (hf download {path}"
            f" --include 'tokenizer*' --local-dir {path.name})"
        )
    raise InputError(f"{path}: there is no such file", fix=fix)


def _is_older_gpt2(folder: Path) -> bool:
    """Whether vocab.json and merges.txt say everything: other classes cut text into words by other rules."""
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    kind = config.get("tokenizer_class") if isinstance(config, dict) else None
    return (
        kind in {None, "GPT2Tokenizer", "GPT2TokenizerFast"} and not (folder / "added_tokens.json").exists()
    )


def _fix_of_folder(folder: Path) -> str:
    """What to do about a folder without tokenizer.json, by what else it holds."""
    model = folder / "tokenizer.model"
    if model.is_file() and kind_of(model.read_bytes()[:1000], None) is Kind.SENTENCEPIECE:
        use = f"use --tokenizer-type SentencePieceTokenizer --tokenizer-model {model}, or "
    elif (folder / "vocab.txt").is_file():
        use = (
            f"use --tokenizer-type BertWordPieceCase (or LowerCase) --vocab-file {folder / 'vocab.txt'}, or "
        )
    elif (folder / "tokenizer_config.json").is_file() or (folder / "vocab.json").is_file():
        use = ""
    else:
        return "give --tokenizer-model a tokenizer.json or a folder with one"
    return f"{use}make one with transformers: {_saving_anew(folder)}"


def _saving_anew(folder: Path) -> str:
    """The command with which transformers writes all that it knows of a tokenizer into its tokenizer.json."""
    return (
        'python -c "from transformers import AutoTokenizer as T;'
        f" T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
