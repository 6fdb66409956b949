"""Flags of `megatrain generate` and `megatrain serve`. This module does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from megatrain.tools.subcommands import add_command


def add_flags(commands: Any) -> None:
    """Add `megatrain generate` and `megatrain serve`."""
    generate = add_command(
        commands,
        "generate",
        help="generate text from a checkpoint",
        description="Load the newest valid checkpoint, or a folder of transformers, and continue prompts.",
    )
    _add_generate(generate)
    serve = add_command(
        commands,
        "serve",
        help="serve completions of a checkpoint over HTTP",
        description="Answer requests of OpenAI's completions API (POST /v1/completions) with the model of a checkpoint.",
    )
    _add_serve(serve)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and its memory."""
    parser.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="--save folder of a run, one of its iter_NNNNNNN folders, a folder of transformers (hf:FOLDER, or the FOLDER with"
        " config.json), or a checkpoint of Megatron-LM (torch_dist)",
    )
    parser.add_argument(
        "--spec",
        nargs="+",
        default=(),
        metavar="WORD",
        help="function with the custom layers of the model, as in training: its code is never taken from a checkpoint",
    )
    parser.add_argument(
        "--spec-digest",
        metavar="DIGEST",
        help="digest of the file of --spec, if it has changed since training (default: that of the checkpoint)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device (default: cuda where there is a GPU, else cpu)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="dtype of weights and cache (default: bf16 on GPUs, fp32 on the CPU)",
    )
    parser.add_argument(
        "--cache-gb",
        type=float,
        metavar="GB",
        help="limit of the cache of keys and values (default: 80%% of the free memory of a GPU, half of that of a host)",
    )
    parser.add_argument(
        "--max-sequences",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of sequences that are computed together (default: 64)",
    )
    parser.add_argument(
        "--termination-id",
        type=int,
        metavar="ID",
        help="token that ends a text (default: the tokenizer's end-of-document token, and each eos_token_id of a model's"
        " config.json and generation_config.json)",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatrain generate`."""
    add_model_flags(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", nargs="+", metavar="TEXT", help="texts to continue")
    prompts.add_argument(
        "--prompt-file", metavar="FILE", help='file with one prompt a line, as JSON: {"prompt": "..."}'
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="maximum number of tokens (default: 64)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="sampling temperature; 0: greedy decoding (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=40,
        metavar="K",
        help="sample from the K most likely tokens; 0: all (default: 40)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the fewest tokens whose probabilities sum to P (default: 1, all)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divide positive logits of earlier tokens by X, multiply negative ones (default: 1, none)",
    )
    parser.add_argument(
        "--stop-words", nargs="+", default=(), metavar="TEXT", help="texts that end the generated text"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; prompt number k uses the seed + k (default: 0)"
    )
    parser.add_argument(
        "--log-probs",
        type=int,
        metavar="N",
        help="report the log-probability of each token, and those of the N most likely ones",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `megatrain serve`."""
    add_model_flags(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port; 0: a free one, which is printed (default: 8000)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name of the model in requests (default: the name of the folder)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its text together (default: the model's context)",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="most sequences that wait for memory; further requests are refused (default: 256)",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        default=1024,
        metavar="N",
        help="most connections; a further one ends the one that has been without a request for longest (default: 1024)",
    )
    parser.add_argument(
        "--idle-seconds",
        type=int,
        default=30,
        metavar="S",
        help="time in which a connection must send the head of a request, or read a part of the answer (default: 30)",
    )
    parser.add_argument(
        "--max-body-mb", type=float, default=4.0, metavar="MB", help="size limit of a request (default: 4)"
    )
    parser.add_argument(
        "--request-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of a request, with its wait for memory (default: 600)",
    )
    parser.add_argument(
        "--stop-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="time that running requests have to finish when the server is stopped (default: 10)",
    )
