"""`megatrain tokenizer`: train a tokenizer on text, and compare tokenizers by the tokens that they need.

--input -> texts, as preprocess_data.py reads them -> train    FOLDER/tokenizer.json, tokenizer_config.json (vocab.txt)
                                                   -> compare  tokens per byte of each tokenizer
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.files import log_to_stderr, write_json
from megatrain.data.preprocess.bad_lines import BadLines
from megatrain.data.preprocess.documents import BadLine, InvalidDocumentError, Position, texts_of
from megatrain.data.preprocess.inputs import find_inputs
from megatrain.data.preprocess.readers import ChunkReader
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.storage.files import replace_file
from megatrain.tools.subcommands import add_command

_BERT: Final = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_UNKNOWN: Final = {"unk_token": "<unk>"}
_MEGABYTE: Final = 1_000_000
_ROW: Final = "{:>10} {:>14} {:>12} {:>12} {:>10}  {}"


_KINDS: Final = {
    "byte-level": "BPE of bytes, as GPT-2's: any text, and back without loss",
    "bpe": "BPE of characters",
    "wordpiece": "BERT's, with its special tokens and a vocab.txt",
    "unigram": "the most probable pieces, as T5's",
}


def _untrained(kind: str, roles: dict[str, str], **options: Any) -> tuple[Tokenizer, Any]:
    """Return a tokenizer and its trainer. `roles`: special tokens by role; `options`: those of all trainers."""
    unknown, metaspace = roles.get("unk_token"), (pre_tokenizers.Metaspace(), decoders.Metaspace())
    model: Any
    parts: tuple[Any, Any]
    trainer: Any
    if kind == "byte-level":
        model, parts = models.BPE(), (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    elif kind == "bpe":
        model, parts, trainer = models.BPE(unk_token=unknown), metaspace, trainers.BpeTrainer(**options)
    elif kind == "unigram":
        model, parts = models.Unigram(), metaspace
        trainer = trainers.UnigramTrainer(unk_token=unknown, **options)
    else:
        model, parts = (
            models.WordPiece(unk_token=unknown),
            (pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
        )
        trainer = trainers.WordPieceTrainer(**options)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = parts
    if kind == "wordpiece":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    return tokenizer, trainer


def add_flags(commands: Any) -> None:
    """Add `megatrain tokenizer ...`."""
    tokenizer = add_command(
        commands, "tokenizer", description="Train a tokenizer on text, or compare several."
    )
    actions = tokenizer.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = add_command(actions, "train", run_train, help="train a tokenizer on text")
    train.add("--output FOLDER", "folder to write", of=Path, required=True)
    train.add("--vocab-size N", "tokens, special ones included", of=int, required=True)
    kinds = "; ".join(f"{name}: {text}" for name, text in _KINDS.items())
    train.add("--kind", kinds, "byte-level", choices=tuple(_KINDS))
    train.add("--eos-token TOKEN", "token that ends documents", "<|endoftext|>")
    train.add("--special-tokens TOKEN ...", "further special tokens", ())
    compare = add_command(
        actions, "compare", run_compare, help="compare tokenizers by the tokens that they need"
    )
    compare.add("tokenizers TOKENIZER ...", "tokenizer.json, a folder with one, or a SentencePiece .model")
    for parser in (train, compare):
        parser.add(
            "--input FILE ...",
            "text, as preprocess_data.py reads it: JSON Lines, .txt, .parquet, compressed, folders, quoted globs",
            required=True,
        )
        parser.add("--json-keys KEY ...", "keys of the text", ("text",))
        parser.add("--on-bad-line", "lines without text", "stop", choices=("stop", "skip"))
        parser.add("--max-mb MB", "read the first megabytes of text only (default: all)", of=float, above=0)


def run_train(arguments: argparse.Namespace) -> None:
    """Train a tokenizer, and write the files that --tokenizer-type HuggingFaceTokenizer and transformers load."""
    kind, folder = arguments.kind, arguments.output
    own = {"byte-level": {}, "wordpiece": _BERT}.get(kind, _UNKNOWN)
    special = list(dict.fromkeys([arguments.eos_token, *own.values(), *arguments.special_tokens]))
    fewest = len(special) + 256 * (kind == "byte-level")
    if arguments.vocab_size <= fewest:
        raise ConfigError(
            f"--vocab-size {arguments.vocab_size} is too small: {fewest} tokens are given",
            fix=f"use more than {fewest}",
        )
    tokenizer, trainer = _untrained(
        kind, own, vocab_size=arguments.vocab_size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(arguments), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    roles = {"eos_token": arguments.eos_token, **own}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
    if kind == "wordpiece":
        ids = tokenizer.get_vocab()
        words = "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__))
        replace_file(folder / "vocab.txt", [words.encode()])
    replace_file(folder / "tokenizer.json", [tokenizer.to_str(pretty=True).encode()])
    size = tokenizer.get_vocab_size()
    few = (
        ""
        if size == arguments.vocab_size
        else f", of --vocab-size {arguments.vocab_size}: the text has no more"
    )
    print(f"{folder}: {size} tokens{few}\n  --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}")


def run_compare(arguments: argparse.Namespace) -> None:
    """Print the tokens that each tokenizer makes of the same text."""
    loaded = [(name, load_tokenizer(_config_of(name))) for name in arguments.tokenizers]
    counts, exact = [0] * len(loaded), [0] * len(loaded)
    num_texts = num_bytes = 0
    texts = _texts(arguments)
    while batch := list(itertools.islice(texts, 256)):
        num_texts += len(batch)
        num_bytes += sum(len(text.encode()) for text in batch)
        for at, (_, tokenizer) in enumerate(loaded):
            encoded = tokenizer.encode_batch(batch)
            counts[at] += sum(map(len, encoded))
            exact[at] += sum(tokenizer.decode(ids) == text for ids, text in zip(encoded, batch, strict=True))
    if not num_bytes:
        raise ConfigError("--input has no text", fix="give --input files with text")
    print(f"{num_texts:,} documents, {num_bytes / _MEGABYTE:,.2f} MB")
    print(_ROW.format("vocabulary", "tokens", "tokens/byte", "bytes/token", "exact", ""))
    for (name, tokenizer), count, same in zip(loaded, counts, exact, strict=True):
        rates = f"{count / num_bytes:.4f}", f"{num_bytes / max(count, 1):.3f}", f"{same / num_texts:.1%}"
        print(_ROW.format(tokenizer.vocab_size, f"{count:,}", *rates, name))
    print("exact: documents that decode to the same text")


def _config_of(name: str) -> TokenizerConfig:
    if name.endswith(".model"):
        return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=name)
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=name)


def _texts(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the texts of --input, up to --max-mb of them."""
    keys: Sequence[str] = arguments.json_keys
    reader = ChunkReader(files=find_inputs(arguments.input), json_keys=keys, max_line_bytes=64 * _MEGABYTE)
    reader.require_readable()
    bad_lines, left = BadLines(arguments.on_bad_line, "", log_to_stderr), (arguments.max_mb or 0) * _MEGABYTE
    for chunk in reader.chunks(Position()):
        bad = []
        for index, content in enumerate(chunk.split()):
            try:
                texts = texts_of(content, chunk, keys)
            except InvalidDocumentError as error:
                bad.append(BadLine(chunk.file, chunk.first + index, str(error), chunk.unit, fix=error.fix))
                continue
            for text in itertools.chain.from_iterable(texts):
                yield text
                left -= len(text.encode())
                if arguments.max_mb is not None and left <= 0:
                    bad_lines.handle(bad, bytes_read=chunk.end.bytes_read)
                    bad_lines.finish()
                    return
        bad += [chunk.too_long] if chunk.too_long else []
        bad_lines.handle(bad, bytes_read=chunk.end.bytes_read)
    bad_lines.finish()
