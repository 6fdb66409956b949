"""Configurations as YAML: the names of the flags, `_` for `-`, in sections or flat.

    seq_length: 1024
    model:
      num_layers: 12     # run.yaml:3
      swiglu: true       # --swiglu

`--config` reads the output of `to_yaml` back to exactly the same values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from megatrain.config.cli.parse_value import BadValueError, RawValue, accepted_values, load_value
from megatrain.config.errors import Problem
from megatrain.config.megatron.flags import GivenFlag, aliases, closest_flag, megatron_flags
from megatrain.config.megatron.other_tools import OTHER_TOOLS
from megatrain.config.plain_yaml import compose_yaml
from megatrain.config.request import Given
from megatrain.config.schema.tree import (
    REMOVED_SETTINGS,
    Config,
    Origin,
    Setting,
    closest_name,
    flag_of,
    settings,
)
from megatrain.config.schema.values import AUTO, INVALID, is_resolved

MEGATRON_SECTIONS: Final = ("language_model", "model_parallel", "MODEL_ARGS")
"""Sections of Megatron-LM's YAML files, which `megatron_yaml.py` reads."""


def read_yaml(file: str) -> list[Given | GivenFlag | Problem]:
    """Read a file: its values, Megatron-LM flags that set nothing here, and problems."""
    root = compose(file, "--config")
    if isinstance(root, Problem):
        return [root]
    return list(_Reader(file).values(root)) if root is not None else []


def compose(file: str, flag: str) -> yaml.Node | Problem | None:
    """Read a file into nodes, which have line numbers; None: it is empty. `flag` is the flag that names it."""
    try:
        return compose_yaml(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        return Problem(f"{flag} {file}: {error.strerror}", "give a readable YAML file")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return _syntax_problem(file, error)


def to_yaml(config: Config, origins: Mapping[str, Origin] | None = None) -> str:
    """Write every value by section, with its origin as a comment. A missing value becomes a comment."""
    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines += ["", f"{section}:"] if lines else [f"{section}:"]
        value = config.raw(setting.path)
        origin = (origins or {}).get(setting.path)
        comment = f"  # {_one_line(str(origin))}" if origin else ""
        if is_resolved(value) or value is AUTO:
            lines.append(f"  {setting.name}: {_yaml_text(value)}{comment}")
        else:
            lines.append(f"  # {setting.name}: {value!r}")
    return "\n".join(lines) + "\n"


class _Reader:
    """Reads the nodes of a file, which have line numbers."""

    def __init__(self, file: str) -> None:
        self.file = file

    def values(self, root: yaml.Node) -> Iterator[Given | GivenFlag | Problem]:
        """Yield the values, each setting once: in its section, or flat."""
        seen: dict[str, str] = {}
        for found in self._values(root):
            if isinstance(found, Given) and is_resolved(found.value):
                place, first = found.origin.detail, seen.setdefault(found.path, found.origin.detail)
                if first != place:
                    name = found.path.partition(".")[2]
                    yield Problem(f"{place}: {name} is given twice, first at {first}", "keep one of them")
            yield found

    def _values(self, root: yaml.Node) -> Iterator[Given | GivenFlag | Problem]:
        sections = {setting.section for setting in settings()}
        flat = {setting.name: setting for setting in settings()}
        if not isinstance(root, yaml.MappingNode):
            yield Problem(
                f"{self.place(root)}: expected sections", f"start with one of {', '.join(sorted(sections))}"
            )
            return
        for key, node, problem in self.entries(root):
            if problem:
                yield problem
            elif key.value in sections and isinstance(node, yaml.MappingNode):
                yield from self.section_values(key.value, node)
            elif _name(key) in flat and not (key.value in sections and is_null(node)):
                yield from self.value(flat[_name(key)], key, node)
            elif key.value not in sections:
                yield from self.answer(key, node, self.unknown_section(key, sections))
            elif not is_null(node):
                yield Problem(
                    f"{self.place(key)}: {key.value} is a section, not {_shown(node)}",
                    "indent its fields below it, such as `  name: value`",
                )

    def section_values(self, section: str, root: yaml.MappingNode) -> Iterator[Given | GivenFlag | Problem]:
        fields = {setting.name: setting for setting in settings() if setting.section == section}
        for key, node, problem in self.entries(root):
            if problem:
                yield problem
            elif f"{section}.{key.value}" in REMOVED_SETTINGS:
                if not is_null(node) and node.value != "auto":
                    reason = REMOVED_SETTINGS[f"{section}.{key.value}"]
                    yield Problem(f"{self.place(key)}: {key.value} was removed: {reason}", "remove the line")
            elif _name(key) not in fields:
                yield from self.answer(key, node, self.unknown_field(section, key, node, fields))
            else:
                yield from self.value(fields[_name(key)], key, node)

    def answer(
        self, key: yaml.Node, node: yaml.Node, unknown: Problem
    ) -> Iterator[Given | GivenFlag | Problem]:
        """Answer a name that is no setting of its place; the setting that it means is not reported as missing."""
        found = self.megatron_field(key, node) or unknown
        yield found
        if isinstance(found, Problem):
            meant = closest_flag(flag_of(key.value).lower())
            yield from meant_setting(meant, Origin("yaml", self.place(key)))

    def megatron_field(self, key: yaml.Node, node: yaml.Node) -> GivenFlag | Problem | None:
        """Answer a Megatron-LM flag that is not a setting, in any section; None: it is not a flag."""
        spelling = flag_of(key.value)
        if spelling in aliases():
            alias = aliases()[spelling]
            meaning = f"{flag_of(alias.path)[2:].replace('-', '_')}: {alias.value or _shown(node)}"
            return Problem(
                f"{self.place(key)}: {key.value} is an old name",
                f"write `{meaning}` below `{alias.path.split('.')[0]}:`",
            )
        if spelling not in megatron_flags():
            return None
        if isinstance(node, yaml.SequenceNode):
            words = tuple(_shown(item) for item in node.value)
        else:
            words = ("null" if is_null(node) else _shown(node),)
        shown = f"{self.place(key)}: {key.value}: {' '.join(words)}"
        return GivenFlag(megatron_flags()[spelling], words, shown)

    def value(self, setting: Setting, key: yaml.Node, node: yaml.Node) -> Iterator[Given | Problem]:
        value = INVALID
        try:
            value = load_value(setting, _raw(setting, node))
        except BadValueError as error:
            yield Problem(f"{self.place(key)}: {setting.name}: {_shown(node)} {error.text}", error.fix)
        yield Given(setting.path, value, Origin("yaml", self.place(key)))

    def entries(self, root: yaml.MappingNode) -> Iterator[tuple[yaml.Node, yaml.Node, Problem | None]]:
        """Iterate over key, value, and the problem of the key."""
        first: dict[str, yaml.Node] = {}
        for key, node in root.value:
            if not isinstance(key, yaml.ScalarNode):
                yield (
                    key,
                    node,
                    Problem(f"{self.place(key)}: a list or mapping is not a name", "write `name: value`"),
                )
            elif key.value in first:
                place = self.place(first[key.value])
                problem = Problem(
                    f"{self.place(key)}: {key.value} is given twice, first at {place}", "keep one of them"
                )
                yield key, node, problem
            else:
                first[key.value] = key
                yield key, node, None

    def unknown_section(self, key: yaml.Node, sections: set[str]) -> Problem:
        elsewhere = closest_flag(flag_of(key.value).lower())
        meant = filter(None, (*sections, elsewhere and elsewhere[2:].replace("-", "_")))
        near = closest_name(key.value, meant)
        if key.value in MEGATRON_SECTIONS:
            fix = "read Megatron-LM's files with --yaml-cfg"
        elif near:
            fix = f"did you mean {near}?"
        else:
            fix = f"see --help for the names, with `-` for `_`, or use one of the sections {', '.join(sorted(sections))}"
        return Problem(f"{self.place(key)}: there is no setting and no section {key.value}", fix)

    def unknown_field(
        self, section: str, key: yaml.Node, node: yaml.Node, names: Mapping[str, Setting]
    ) -> Problem:
        owners = [setting.section for setting in settings() if setting.name == key.value]
        elsewhere = closest_flag(flag_of(key.value).lower())
        meant = [closest_name(key.value.lower(), names), elsewhere and elsewhere[2:].replace("-", "_")]
        near = closest_name(key.value.lower(), filter(None, meant))
        if isinstance(node, yaml.MappingNode) and any(one.section == key.value for one in settings()):
            fix = f"begin the line `{key.value}:` at the left margin: it is a section of its own"
        elif owners:
            fix = f"move {key.value} below `{owners[0]}:`"
        elif flag_of(key.value).lower() in OTHER_TOOLS:
            fix = OTHER_TOOLS[flag_of(key.value).lower()]
        elif near:
            fix = f"did you mean {near}?"
        else:
            fix = "see --help for the fields, with `-` for `_`"
        return Problem(f"{self.place(key)}: section {section} has no field {key.value}", fix)

    def place(self, node: yaml.Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}"


def meant_setting(flag: str | None, origin: Origin) -> Iterator[Given]:
    """Yield the setting of the flag that a mistyped name means, as one whose value is not known: nothing follows from it."""
    yield from (Given(setting.path, INVALID, origin) for setting in settings() if setting.flag == flag)


def _name(key: yaml.Node) -> str:
    return str(key.value).replace("-", "_")


def _raw(setting: Setting, node: yaml.Node) -> RawValue:
    """Return the text as written, so that `1e-4`, a string in YAML 1.1, can be parsed as a number."""
    fix = f"give {setting.name} {accepted_values(setting)}"
    if isinstance(node, yaml.MappingNode):
        raise BadValueError("is not one value", fix=fix)
    if is_null(node):
        return None
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) and not is_null(item) for item in node.value):
            raise BadValueError("has other entries than plain values", fix=fix)
        return [item.value for item in node.value]
    if setting.kind is str and not setting.choices and node.tag.endswith(":bool"):
        raise BadValueError("is true or false, not text", fix=f"{fix}; quote it if it is text")
    text: str = node.value
    return text


def is_null(node: yaml.Node) -> bool:
    """Return whether a node is null or has no text."""
    return bool(node.tag == "tag:yaml.org,2002:null")


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value) or "''"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _syntax_problem(file: str, error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    place = f"{file}:{mark.line + 1}" if mark else file
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Problem(
        f"{place}: not valid YAML: {_one_line(str(what))}", "fix the syntax there or in the line before"
    )


def _yaml_text(value: Any) -> str:
    if value is AUTO:
        return "auto"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_yaml_text, value)) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Quote a text unless it is a plain word."""
    is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and yaml.safe_load(text) == text
    return text if is_plain else yaml.safe_dump(text, default_style='"', width=10**9).rstrip("\n")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
