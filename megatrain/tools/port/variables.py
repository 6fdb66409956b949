"""Variables of a script that have a value only where it runs: those of its caller and of a launcher.

CKPT=$1                          open: ${1}
TP=${TP:-2}                      assumed: 2
LOAD=${LOAD:-$SAVE}              assumed: $SAVE, which may be open
NODE=${SLURM_NODEID:-0}          of the launcher: ${SLURM_NODEID:-0} stays
if [ -z "$GPUS" ]; then GPUS=8   not set
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_LAUNCHER: Final = re.compile(
    r"(?:SLURM|SLURMD|PMI|PMIX|OMPI|PBS|LSB)_\w+|MASTER_(?:ADDR|PORT)|NODE_RANK|(?:LOCAL_|GROUP_)?RANK|NODEID"
)
_USE: Final = re.compile(
    r"(?P<test>-[nz]\s+\"?)?\$(?:(?P<name>\w+)|\{(?P<braced>\w+)"
    r"(?:(?P<default>:?[-=+](?P<value>[^${}`]*)\})|(?P<nested>:?[-=+](?=(?P<text>(?:[^{}`]|\{[^{}`]*\})*)\})))?)"
)
_ASSIGNMENT: Final = re.compile(
    r"(?:\(\([ \t]*|^|[\s;&|(])(\w+)(?:[ \t]+(?==[ \t]+\d))?\+?=(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|\([^)]*\)|[^\s;])*",
    re.MULTILINE,
)
_COMMENT: Final = re.compile(r"^[ \t]*#[^\n]*", re.MULTILINE)
_FUNCTION: Final = re.compile(
    r"^([ \t]*)(?:function[ \t]+[\w-]+(?:[ \t]*\(\))?|[\w-]+[ \t]*\(\))\s*\{(?:[^\n]*\}[ \t]*$|.*?^\1\}[ \t]*$)",
    re.MULTILINE | re.DOTALL,
)
_OF_BASH: Final = re.compile(
    r"_|BASH\w*|RANDOM|SECONDS|LINENO|PPID|IFS|OPT\w+|PIPESTATUS|FUNCNAME|REPLY|E?UID|SHLVL|OSTYPE|MACHTYPE|0|PS\d"
)


@dataclass(frozen=True)
class OpenVariable:
    """A variable whose value is not known here."""

    name: str
    text: str
    """Shell text that stands for it in the printed command."""
    is_of_launcher: bool


@dataclass(frozen=True)
class Assumed:
    """A default that a script gives."""

    name: str
    value: str
    line: int


def open_variables(text: str, known: Mapping[str, str]) -> dict[str, OpenVariable]:
    """Return the variables that a script reads without having set them or a default for them.

    Args:
        known: variables that have a value.
    """
    text = _COMMENT.sub("", text)
    of_script = {_name(match) for match in _USE.finditer(_FUNCTION.sub("", text))}
    first_set: dict[str, int] = {}
    for match in _ASSIGNMENT.finditer(text):
        # A value may read the old one: `A=${A:-1}`.
        first_set.setdefault(match[1], match.end())
    found: dict[str, OpenVariable] = {}
    with_default: set[str] = set()
    for match in _USE.finditer(text):
        name = _name(match)
        is_argument_of_function = name.isdigit() and name not in of_script
        is_set = name in known or _OF_BASH.fullmatch(name) or first_set.get(name, len(text)) < match.start()
        if is_set or is_argument_of_function:
            continue
        if match["default"] or match["nested"] or (match["test"] and name in first_set):
            with_default.add(name)
        if name not in found or match["value"]:
            found[name] = _open_variable(name, match)
    return {
        name: variable
        for name, variable in found.items()
        if variable.is_of_launcher or name not in with_default
    }


def passes_arguments(text: str) -> bool:
    """Return whether a script passes all of its arguments on, outside of functions."""
    return bool(re.search(r"\$[@*]|\$\{[@*]", _FUNCTION.sub("", _COMMENT.sub("", text))))


def _name(match: re.Match[str]) -> str:
    return match["name"] or match["braced"]


def _open_variable(name: str, match: re.Match[str]) -> OpenVariable:
    is_of_launcher = bool(_LAUNCHER.fullmatch(name))
    default = match["default"] if is_of_launcher and match["value"] else ""
    return OpenVariable(name, f"${{{name}{default.rstrip('}')}}}", is_of_launcher)


def assumed(text: str, known: Mapping[str, str]) -> Iterator[Assumed]:
    """Yield the first default of each variable, unless the launcher sets the variable."""
    seen = set(known)
    without_comments = _COMMENT.sub("", text)
    for match in _USE.finditer(without_comments):
        name = match["braced"]
        value, sign = match["value"] or match["text"], match["default"] or match["nested"]
        if not name or name in seen or _LAUNCHER.fullmatch(name) or not value:
            continue
        if "+" not in sign[:2]:
            seen.add(name)
            yield Assumed(name, value.strip("\"'"), without_comments.count("\n", 0, match.start()) + 1)
