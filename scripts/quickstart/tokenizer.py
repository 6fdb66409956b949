"""Train the quickstart's tokenizer: a byte-level BPE on the "text" of a JSONL file, with <|endoftext|> as id 0."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator

END_OF_TEXT = "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help='JSONL with a "text" in every line')
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens, <|endoftext|> included [4096]")
    arguments = parser.parse_args()

    tokenizer = train(arguments.input, vocab_size=arguments.vocab_size)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    # quickstart.sh must not mistake a truncated file for a finished one.
    unfinished = arguments.output.with_name(arguments.output.name + ".part")
    tokenizer.save(str(unfinished))
    unfinished.replace(arguments.output)
    print(f"{arguments.output}: {tokenizer.get_vocab_size()} tokens")


def train(path: Path, *, vocab_size: int) -> Tokenizer:
    """Train a BPE of `vocab_size` tokens; the 256 single bytes are among them, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(path), trainer)
    return tokenizer


def texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


if __name__ == "__main__":
    main()
