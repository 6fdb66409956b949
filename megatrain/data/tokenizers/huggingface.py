"""Tokenizers of the `tokenizers` library: HuggingFaceTokenizer, GPT2BPETokenizer and the two BertWordPiece types.

    tokenizer.json             ─┐  (with the other files of its folder: `special_tokens`)
    vocab.json + merges.txt    ─┼─> the library's tokenizer + {"eos_token": "</s>", ...} ──> LibraryTokenizer
    vocab.txt                  ─┘

Code in a tokenizer's folder is never run, and nothing is downloaded from the hub.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.files import NO_PAD, Kind, hub_fix, kind_of, read_file, read_json
from megatrain.data.tokenizers.hf_tokenizer import HfTokenizer, known_roles
from megatrain.data.tokenizers.identity import fingerprint_of, full_fingerprint
from megatrain.data.tokenizers.special_tokens import NamedTokens, named_tokens, require_named, use_named
from megatrain.data.tokenizers.vocabularies import byte_level_bpe, word_pieces

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT: Final = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""End-of-document tokens to try, in this order, if no file names one; `note` reports the choice."""
OTHER_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. The text of a special token is encoded as that token."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        config: TokenizerConfig,
        *,
        named: Mapping[str, str],
        definition: dict[str, Any],
        file: Path | None = None,
    ) -> None:
        """Wrap a tokenizer of the library.

        The end-of-document token is the `eos_token`; without one the `sep_token`, as in Megatron-LM; without either, the
        first of `END_OF_DOCUMENT` in the vocabulary, if any (Megatron-LM has none in this case).

        Args:
            library: the tokenizer.
            config: its configuration.
            named: text of tokens by role, such as `eos_token`; tokens outside the vocabulary are ignored.
            definition: everything that determines the ids, for the fingerprint.
            file: a tokenizer.json that says all of it.
        """
        self._library = library
        self._file = None if config.tokenizer_special_tokens else file
        self._roles = dict(named)
        self._adds_tokens = library.num_special_tokens_to_add(is_pair=False) > 0
        self._with_template = self._adds_tokens and not config.tokenizer_hf_no_include_special_tokens
        if config.tokenizer_special_tokens:
            library.add_special_tokens(list(config.tokenizer_special_tokens))
            definition = definition | {"added_special_tokens": list(config.tokenizer_special_tokens)}
        if self._with_template:
            definition = definition | {"with_template": True}
        self._digest = fingerprint_of(definition)
        self.ids: Mapping[str, int] = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.ids.values(), default=-1) + 1  # not the number of ids: they may have gaps
        self.role_ids = {role: self.ids[token] for role, token in named.items() if token in self.ids}
        is_named = "eos_token" in named or "sep_token" in named
        guess = None if is_named else next(filter(self._has, END_OF_DOCUMENT), None)
        self.eod = self.role_ids.get("eos_token" if "eos_token" in named else "sep_token")
        self.note: str | None = None
        if guess is not None:
            self.eod = library.token_to_id(guess)
            self.note = (
                f"no file of the tokenizer names an eos_token: {guess} (id {self.eod}) is used to end documents."
                f' To confirm it, add {{"eos_token": "{guess}"}} to tokenizer_config.json'
            )
        special = (self.eod, *(self.role_ids.get(role) for role in OTHER_SPECIAL))
        self.special_ids = frozenset(number for number in special if number is not None)
        pad = self.role_ids.get("pad_token")
        self.pad = NO_PAD if pad is None else pad

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the digests of ids and of the definition; of the latter alone if encoding is random (BPE dropout)."""
        if getattr(self._library.model, "dropout", None):
            return self._digest
        special = self._matched()
        return full_fingerprint(self.ids, self.encode, self._digest, special=special)

    def _matched(self) -> list[str]:
        """Return the tokens that are matched in text."""
        return [token.content for token in self._library.get_added_tokens_decoder().values()]

    def _has(self, token: str) -> bool:
        return self._library.token_to_id(token) is not None

    def encode(self, text: str) -> list[int]:
        """Tokenize a text."""
        return list(self._library.encode(text, add_special_tokens=self._with_template).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize many texts."""
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=self._with_template)
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Convert ids to text, including special tokens."""
        return str(self._library.decode(list(ids), skip_special_tokens=False))

    def to_hf(self) -> HfTokenizer:
        """Return a tokenizer.json that does what this tokenizer does: tokens are added and left out as configured."""
        matched = self._matched()
        end = {} if self.eod is None else {"eos_token": str(self._library.id_to_token(self.eod))}
        roles = known_roles(end | self._roles, matched)
        special = not self._library.encode_special_tokens
        if self._file is not None and self._with_template == self._adds_tokens:
            return HfTokenizer(self._file.read_bytes(), roles, matches_special=special)
        definition = json.loads(self._library.to_str())
        if not self._with_template:
            definition["post_processor"] = None
        text = json.dumps(definition, indent=2, ensure_ascii=False) + "\n"
        return HfTokenizer(text.encode(), roles, matches_special=special)


def load_huggingface(config: TokenizerConfig) -> LibraryTokenizer:
    """Load a tokenizer.json or a folder with one; the other files of the folder name special tokens.

    A folder in GPT-2's older format, with only vocab.json and merges.txt, is loaded as by GPT2BPETokenizer.
    """
    path = Path(config.tokenizer_model or "")
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        _require_path(path)
        if not _is_old_gpt2_format(path):
            raise InputError(f"{path}: contains no tokenizer.json", fix=_fix_of_folder(path))
        files = path / "vocab.json", path / "merges.txt"
        return _byte_level(config, *files, {"eos_token": "<|endoftext|>"}, named_tokens(path))
    definition: dict[str, Any] = read_file(file, Kind.TOKENIZER_JSON, flag="--tokenizer-model").data
    library = _load_library(file)
    # Truncation and padding in the file are meant for inference and would damage documents.
    library.no_truncation()
    library.no_padding()
    padding = definition.get("padding")
    is_whole = definition.get("truncation") is None and padding is None
    definition.update(truncation=None, padding=None)
    named = named_tokens(folder, taken=library.get_added_tokens_decoder())
    _require_named(named, library, file)
    changed = use_named(library, named)
    if changed:
        definition["named_tokens"] = changed
    if named.splits_special:
        library.encode_special_tokens = True
        definition["split_special_tokens"] = True
    filler = {"pad_token": padding["pad_token"]} if isinstance(padding, dict) else {}
    return LibraryTokenizer(
        library,
        config,
        named={**filler, **named.roles},
        definition=definition,
        file=file if is_whole and not changed else None,
    )


def load_gpt2_bpe(config: TokenizerConfig) -> LibraryTokenizer:
    """Load GPT-2's byte-level BPE from --vocab-file and --merge-file. <|endoftext|> ends documents."""
    files = Path(config.vocab_file or ""), Path(config.merge_file or "")
    return _byte_level(config, *files, {"eos_token": "<|endoftext|>"})


def load_bert(config: TokenizerConfig) -> LibraryTokenizer:
    """Load BERT's WordPiece from --vocab-file. [SEP] ends documents, as in Megatron-LM."""
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
    """Load byte-level BPE.

    Args:
        config: the configuration.
        vocab, merges: paths of the two files.
        roles: default text of tokens by role.
        named: tokens that other files of the folder name, which override `roles`.
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
    fix = f"correct the names, or add the tokens to it with transformers: {_resave_command(file.parent)}"
    require_named(named, lambda token: library.token_to_id(token) is not None, file=file, fix=fix)


def _load_library(file: Path) -> tokenizers.Tokenizer:
    import tokenizers  # noqa: PLC0415 - slow to load, and most processes need no tokenizer

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(
            f"{file}: is not a tokenizer of the `tokenizers` library: {error}",
            fix="upgrade the library (pip install -U tokenizers), or make the file again with transformers'"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        ) from error


def _require_path(path: Path) -> None:
    if path.exists():
        return
    fix = "give --tokenizer-model a tokenizer.json or a folder with one"
    raise InputError(f"{path}: there is no such file", fix=fix + hub_fix(path, files="tokenizer*"))


def _is_old_gpt2_format(folder: Path) -> bool:
    """Return whether vocab.json and merges.txt define the tokenizer; other classes split text into words differently."""
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        return False
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    kind = config.get("tokenizer_class") if isinstance(config, dict) else None
    return (
        kind in {None, "GPT2Tokenizer", "GPT2TokenizerFast"} and not (folder / "added_tokens.json").exists()
    )


def _fix_of_folder(folder: Path) -> str:
    """Return the fix for a folder without tokenizer.json, depending on its other files."""
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
    return f"{use}make one with transformers: {_resave_command(folder)}"


def _resave_command(folder: Path) -> str:
    """Return the command with which transformers saves everything about a tokenizer in its tokenizer.json."""
    return (
        'python -c "from transformers import AutoTokenizer as T;'
        f" T.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
