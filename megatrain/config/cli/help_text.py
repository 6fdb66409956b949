"""What each setting means, in words: read from the sentence under the field, in the source, when help is asked for."""

import ast
import inspect
import textwrap

from megatrain.config.cli.parse_value import accepted_values
from megatrain.config.schema.tree import section_types, settings


def section_help(section: str) -> str:
    """The sentence of a section."""
    return inspect.cleandoc(section_types()[section].__doc__ or "")


def field_help() -> dict[str, str]:
    """The sentence of each setting, by path."""
    return {
        f"{section}.{name}": text
        for section, cls in section_types().items()
        for name, text in _field_sentences(cls).items()
    }


def docs_reference() -> str:
    """The reference page of all flags, in Markdown."""
    texts = field_help()
    lines = [
        "# Configuration",
        "",
        "Made from `megatrain/config/` by `docs_reference()`: change it there. Each flag can stand in a YAML file",
        "(`--config FILE`, repeatable) below its section, with `_` for `-`. Flags win over YAML, YAML over defaults.",
        "A switch takes no value; its opposite is `--no-...`, or the flag without `no-`.",
        "`auto`: derived from other values, as the plan that is printed at start says.",
    ]
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines += ["", f"## {section}", "", section_help(section), ""]
            lines += ["| flag | takes | default | meaning |", "|---|---|---|---|"]
        if setting.is_required:
            default = "required"
        elif setting.is_derived_if_open:
            default = "auto"
        elif setting.default in (None, ()):
            default = "none"
        else:
            default = str(setting.default).lower() if setting.kind is bool else str(setting.default)
        takes = "switch" if setting.kind is bool else accepted_values(setting)
        lines.append(f"| `{setting.flag}` | {takes} | {default} | {texts.get(setting.path, '')} |")
    return "\n".join(lines) + "\n"


def _field_sentences(cls: type) -> dict[str, str]:
    """Name and sentence of each field of a dataclass; none if its source is not at hand."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:
        return {}
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    sentences = {}
    for field, following in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            sentences[field.target.id] = inspect.cleandoc(str(following.value.value))
    return sentences
