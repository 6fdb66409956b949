"""Build tokenizers of the `tokenizers` library from plain vocabulary files, and check that the files fit together.

vocab.json {"Ġthe": 262, ...} + merges.txt "Ġ t" ...   ──> byte_level_bpe, GPT-2's
vocab.txt  [PAD] [UNK] ... ##ing                       ──> word_pieces, BERT's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from megatrain.config.errors import InputError
from megatrain.data.tokenizers.files import GET_AGAIN, TokenizerFile

if TYPE_CHECKING:
    import tokenizers

BERT_ROLES: Final = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
NUM_CASED_SENTINELS: Final = 100
"""Tokens <extra_id_0>, <extra_id_1>, ... that Megatron-LM adds to cased vocabularies, for T5."""


@dataclass(frozen=True)
class BuiltTokenizer:
    """A tokenizer, everything that determines its ids, and its special tokens by role."""

    library: tokenizers.Tokenizer
    definition: dict[str, Any]
    named: dict[str, str]


def byte_level_bpe(
    vocab_file: TokenizerFile, merge_file: TokenizerFile, *, special: Sequence[str]
) -> BuiltTokenizer:
    """Build GPT-2's tokenizer: words by its regular expression, bytes as characters, merges in the order of the file.

    Args:
        vocab_file: the vocabulary.
        merge_file: the merges.
        special: tokens to match in text before it is split into words, if the vocabulary has them.
    """
    import tokenizers  # noqa: PLC0415 - slow to load, and most processes need no tokenizer
    from tokenizers import decoders, models, pre_tokenizers  # noqa: PLC0415

    vocab: dict[str, int] = vocab_file.data
    _check_ids(vocab, vocab_file)
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()
    if missing:  # the library would silently drop these bytes from every text
        raise InputError(
            f"{vocab_file.path}: {len(missing)} of the 256 bytes have no token, such as {min(missing)!r}",
            fix="use the vocabulary of a byte-level tokenizer, such as GPT-2's",
        )
    merges = _merges(merge_file, vocab, vocab_file)
    found = [token for token in special if token in vocab]
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(found)
    return BuiltTokenizer(library, {"byte_level_bpe": vocab, "merges": merges, "special": found}, {})


def word_pieces(file: TokenizerFile, *, lowercase: bool) -> BuiltTokenizer:
    """Build BERT's tokenizer: its normalization, words split at spaces and punctuation, then the longest pieces."""
    import tokenizers  # noqa: PLC0415 - slow to load, and most processes need no tokenizer
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors  # noqa: PLC0415

    vocab = {line.rstrip(): number for number, line in enumerate(file.lines())}
    missing = [token for token in BERT_ROLES.values() if token not in vocab]
    if missing:
        raise InputError(
            f"{file.path}: is not a BERT vocabulary: {' '.join(missing)} missing",
            fix="give --vocab-file a vocab.txt with one token per line, including the special ones",
        )
    sentinels = [] if lowercase else [f"<extra_id_{number}>" for number in range(NUM_CASED_SENTINELS)]
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))  # noqa: S106
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # A clean-up joins tokens that come one by one in other ways.
    library.decoder = decoders.WordPiece(cleanup=False)
    library.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    library.add_special_tokens([*BERT_ROLES.values(), *sentinels])
    definition = {"word_pieces": vocab, "lowercase": lowercase, "sentinels": sentinels}
    return BuiltTokenizer(library, definition, dict(BERT_ROLES))


def _check_ids(vocab: dict[str, int], file: TokenizerFile) -> None:
    by_id = {number: token for token, number in vocab.items()}
    if len(by_id) < len(vocab):
        token = next(token for token, number in vocab.items() if by_id[number] != token)
        raise InputError(
            f"{file.path}: {token!r} and {by_id[vocab[token]]!r} both have id {vocab[token]}", fix=GET_AGAIN
        )
    if min(by_id) < 0:
        raise InputError(f"{file.path}: {by_id[min(by_id)]!r} has id {min(by_id)}", fix=GET_AGAIN)


def _merges(file: TokenizerFile, vocab: dict[str, int], vocab_file: TokenizerFile) -> list[tuple[str, str]]:
    """Return the pairs of tokens in merge order."""
    merges = []
    for number, line in enumerate(file.lines(), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = tuple(line.split(" "))
        if len(pair) != 2:
            raise InputError(f"{file.path}:{number}: {line[:80]!r} is not a pair of tokens", fix=GET_AGAIN)
        unknown = next((token for token in (*pair, "".join(pair)) if token not in vocab), None)
        if unknown is not None:
            raise InputError(
                f"{file.path}:{number}: {line!r} merges to or from {unknown!r}, which {vocab_file.path} lacks",
                fix="give --vocab-file and --merge-file of the same tokenizer",
            )
        merges.append((pair[0], pair[1]))
    return merges
