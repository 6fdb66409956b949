"""The text of --help, generated from the settings."""

import argparse
import textwrap
from typing import Any

from megatrain.config.cli.help_text import field_help, section_help
from megatrain.config.schema.tree import Setting, settings


def help_page(program: str) -> str:
    """Return the text of --help: all flags by section."""
    texts = field_help()
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [--config FILE] [--flag VALUE ...]\n"
        f"       torchrun --nproc-per-node 8 {program} [--config FILE] [--flag VALUE ...]\n"
        f"       {program} [--config FILE] [--flag VALUE ...] --dry-run [--world-size RANKS]",
        description="Pretrain a language model. Flags override --config files, later files override earlier ones. A run needs"
        f" {', '.join(setting.flag for setting in settings() if setting.is_required)}, a length (--train-iters), data"
        " (--data-path, or --mock-data) and a tokenizer (--tokenizer-type).",
        epilog="Other flags of Megatron-LM: megatrain settings --differences.",
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    general.add_argument("--version", action="store_true", help="show the version and exit")
    general.add_argument("--config", metavar="FILE", help="a YAML file of sections; repeatable")
    general.add_argument(
        "--yaml-cfg",
        metavar="FILE",
        help="a YAML file of Megatron-LM's arguments, or the MODEL_ARGS of one of its tests; repeatable",
    )
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(
                setting.section, section_help(setting.section)
            )
        _add_flag(groups[setting.section], setting, texts.get(setting.path, ""))
    return parser.format_help()


def _add_flag(group: Any, setting: Setting, text: str) -> None:
    is_switch = setting.kind is bool
    default = "required" if setting.is_required else f"default: {setting.default_in_words}"
    group.add_argument(
        setting.flag,
        metavar="" if is_switch else _metavar(setting),
        help=f"{text} ({default})".replace("%", "%%"),
    )
    if is_switch:
        shown = f"turn off {setting.flag}" if setting.default else argparse.SUPPRESS
        group.add_argument(setting.opposite_flag, metavar="", help=shown)


def _metavar(setting: Setting) -> str:
    if setting.choices:
        words = "{" + ",".join([*setting.choices, *(["FILE.py:FUNCTION"] * setting.accepts_function)]) + "}"
        return f"[{words}]" if setting.alone else words
    word = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}[setting.kind]
    return f"{word} ..." if setting.is_list else word


class _HelpFormatter(argparse.HelpFormatter):
    """Shows the metavar as it is, and does not break flags at hyphens."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        metavar = f" {action.metavar}" if action.metavar else ""
        return ", ".join(action.option_strings) + metavar

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent("\n".join(self._split_lines(text, width - len(indent))), indent)
