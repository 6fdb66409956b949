"""Flags of `megatrain data`. This module does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatrain.config.schema.tree import settings
from megatrain.tools.subcommands import RUN_FLAGS, add_command


def add_flags(commands: Any, texts: Mapping[str, str]) -> None:
    """Add `megatrain data ...`. `texts`: help texts of the settings; only needed to print help."""
    data = add_command(
        commands,
        "data",
        help="inspect datasets, show samples, build index caches, merge datasets",
        description="A dataset is named by its prefix: the path without .bin and .idx.",
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = add_command(
        actions,
        "inspect",
        help="count documents and tokens of a dataset, and check its description",
        description="Count documents and tokens of a dataset, and compare them with its description PREFIX.json.",
    )
    inspect.add_argument("prefix", metavar="PREFIX", help="path or URL without .bin and .idx")
    inspect.add_argument("--document", type=int, metavar="K", help="show document K, counted from 0")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    _add_index_cache(inspect, texts)
    _add_tokenizer(inspect, texts)

    sample = add_command(
        actions,
        "sample",
        takes_run_flags=True,
        help="show one sample exactly as training reads it",
        usage="%(prog)s FLAGS --of {train,valid,test} --index K [--set NAME] [--world-size N] [--json]",
        description=f"Show one sample of a run. {RUN_FLAGS}",
    )
    sample.add_argument("--of", required=True, choices=("train", "valid", "test"), help="the split")
    sample.add_argument(
        "--index", required=True, type=int, metavar="K", help="number of the sample, counted from 0"
    )
    sample.add_argument("--set", metavar="NAME", help="name of one of --multiple-validation-sets")
    sample.add_argument("--json", action="store_true", help="print one JSON object")

    index = add_command(
        actions,
        "index",
        takes_run_flags=True,
        help="build the index caches of a run in advance",
        usage="%(prog)s FLAGS [--world-size N]",
        description=f"Build the sample indices of a run in its cache folder. {RUN_FLAGS}",
    )
    for parser in (sample, index):
        parser.add_argument(
            "--world-size",
            type=int,
            metavar="N",
            help="ranks of the run (default: the smallest number for its layout); it changes the order of samples only"
            " without --global-batch-size",
        )

    merge = add_command(
        actions,
        "merge",
        help="merge datasets into one",
        description="Write one dataset with the documents of several, in the order of the arguments.",
    )
    merge.add_argument("prefixes", nargs="+", metavar="PREFIX", help="paths or URLs without .bin and .idx")
    merge.add_argument("--output-prefix", required=True, metavar="OUT", help="path of the new dataset")
    _add_index_cache(merge, texts)


def _add_index_cache(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    text = texts.get("data.object_storage_cache_path", "")
    parser.add_argument("--object-storage-cache-path", metavar="FOLDER", help=text)


def _add_tokenizer(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    """Add the tokenizer's flags; values are stored as text, by the path of the setting."""
    group = parser.add_argument_group("tokenizer", "to decode documents and to know their end token")
    for setting in settings():
        if setting.section != "tokenizer":
            continue
        text = texts.get(setting.path, "").replace("%", "%%")
        if setting.kind is bool:
            group.add_argument(setting.flag, dest=setting.path, action="store_const", const="true", help=text)
            group.add_argument(
                setting.opposite_flag,
                dest=setting.path,
                action="store_const",
                const="false",
                help=argparse.SUPPRESS if not setting.default else f"turn {setting.flag} off",
            )
        else:
            metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.name.upper()
            nargs = "+" if setting.is_list else None
            group.add_argument(setting.flag, dest=setting.path, metavar=metavar, nargs=nargs, help=text)
