"""Help texts: the docstrings under the fields of config/schema/, read from the source when help is printed."""

import ast
import dataclasses
import inspect
import textwrap

from megatrain.config.cli.parse_value import accepted_values
from megatrain.config.schema.tree import section_types, settings


def section_help(section: str) -> str:
    """Return the help text of a section."""
    return inspect.cleandoc(section_types()[section].__doc__ or "")


def field_help() -> dict[str, str]:
    """Return the help text of each setting, by path."""
    meanings = {
        setting.path: "; ".join(f"{choice}: {meaning}" for choice, meaning in setting.meanings.items())
        for setting in settings()
    }
    return {
        path: f"{text} {meanings[path]}." if meanings[path] else text
        for section, cls in section_types().items()
        for name, text in docs_of(cls).items()
        for path in (f"{section}.{name}",)
    }


def docs_of(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass and of its bases, by name."""
    bases = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return {name: text for base in bases for name, text in _field_docs(base).items()}


def docs_reference() -> str:
    """Return the reference of all flags in Markdown: `megatrain settings`, and a page of the site."""
    texts = field_help()
    lines = [
        "# Configuration",
        "",
        "`megatrain settings` prints this page. A YAML file (`--config FILE`, repeatable) contains the same settings below their",
        "section, with `_` for `-`. Flags override YAML, YAML overrides defaults.",
        "A switch has no value; its opposite is `--no-...`, or the flag without `no-`.",
        "`auto`: derived from other values; the plan printed at start has value and reason.",
    ]
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines += ["", f"## {section}", "", section_help(section), ""]
            lines += ["| flag | value | default | meaning |", "|---|---|---|---|"]
        accepted = "switch" if setting.kind is bool else accepted_values(setting)
        meaning = texts.get(setting.path, "").replace("|", r"\|")
        lines.append(f"| `{setting.flag}` | {accepted} | {setting.default_in_words} | {meaning} |")
    return "\n".join(lines) + "\n"


def _field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass; empty without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:
        return {}
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[field.target.id] = inspect.cleandoc(str(following.value.value))
    return docs
