"""Flags of `megatrain convert`. This module does not import torch."""

from __future__ import annotations

from typing import Any

from megatrain.tools.subcommands import RUN_FOLDER, add_command, add_file_options


def add_flags(commands: Any) -> None:
    """Add `megatrain convert ...`."""
    convert = add_command(
        commands,
        "convert",
        help="convert checkpoints of other programs, and to those of transformers",
        description="Convert checkpoints from and to those of other programs, without a GPU. No code that they name is run.",
    )
    directions = convert.add_subparsers(dest="action", required=True, metavar="DIRECTION")
    texts = {
        "megatron-to-megatrain": (
            "write a checkpoint of Megatron-LM as one of megatrain",
            "--save folder of Megatron-LM, or one of its iter_NNNNNNN folders",
        ),
        "megatrain-to-megatron": (
            "write a checkpoint as one of Megatron-LM (torch_dist), with which its runs continue",
            RUN_FOLDER,
        ),
        "hf-to-megatrain": (
            "write a folder of transformers (config.json, safetensors) as a checkpoint of megatrain, to start from",
            "folder that save_pretrained wrote, or of a download",
        ),
        "megatrain-to-hf": (
            "write the weights of a checkpoint as a folder that from_pretrained of transformers reads",
            RUN_FOLDER,
        ),
    }
    parsers = {}
    for name, (text, source) in texts.items():
        parsers[name] = add_command(directions, name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parsers[name].add_argument("source", metavar="PATH", help=source)
        parsers[name].add_argument("target", metavar="TARGET", help="folder to write to")
    megatron, _, theirs, ours = parsers.values()
    megatron.add_argument(
        "--allow-pickle",
        action="store_true",
        help="also read the format torch (mp_rank_*), whose files are pickled; no code in them is run",
    )
    rows = {
        megatron: "tokens to keep, without padding (default: --vocab-size of the run, or all rows if it had none)",
        theirs: "rows of the vocabulary to keep, such as the number of tokens of the tokenizer (default: all)",
    }
    for parser, text in rows.items():
        parser.add_argument("--vocab-size", type=int, metavar="N", help=text)
        parser.add_argument("--files", type=int, metavar="N", help="number of files (default: of 5 GB each)")
    ours.add_argument(
        "--architecture",
        metavar="NAME",
        help="class of transformers, such as MistralForCausalLM (default: the first that computes the same)",
    )
    ours.add_argument(
        "--no-compare", action="store_true", help="do not load both models to compare their logits"
    )
    add_file_options(ours)
