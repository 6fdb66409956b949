"""A plan as a table for people: every value that is not a default, all that was derived, and from what.

model
  num_layers          12          --num-layers
  ffn_hidden_size     2048        derived: 4 * hidden size 768 * 2/3, down to a multiple of 64 (gated)
"""

import textwrap
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.differences import default_differences
from megatrain.config.plan import Plan

_WIDTH: Final = 100


@dataclass(frozen=True)
class _Row:
    name: str
    value: str
    source: str


def render_plan(plan: Plan) -> str:
    """The table, with the notes below it. No colours."""
    sections: dict[str, list[_Row]] = {}
    for path, origin in plan.origins.items():
        section, name = path.split(".")
        if origin.kind == "default":
            continue
        holder = plan.derived if section == "derived" else getattr(plan.config, section)
        source = origin.detail if section == "derived" else str(origin)
        sections.setdefault(section, []).append(_Row(name, _shown(getattr(holder, name)), source))
    sections["derived"] = sections.pop("derived", [])
    rows = [row for group in sections.values() for row in group]
    name_width = max(len(row.name) for row in rows)
    value_width = min(24, max(len(row.value) for row in rows))
    lines = []
    for section, group in sections.items():
        lines.append(section)
        for row in group:
            lines += _row_lines(row, name_width, value_width)
    for note in (*default_differences(plan), *plan.notes):
        lines += _wrapped(note, "note: ", "      ")
    return "\n".join(lines) + "\n"


def _row_lines(row: _Row, name_width: int, value_width: int) -> list[str]:
    """One line; more if the source is long. A value too long for its column pushes the source to the next line."""
    head = f"  {row.name:<{name_width}}  {row.value:<{value_width}}  "
    margin = " " * (name_width + value_width + 6)
    if len(head) > len(margin):
        return [head.rstrip(), *_wrapped(row.source, margin, margin)]
    return _wrapped(row.source, head, margin)


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    """Lines of `text`; flags and file names are not torn apart."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 10**15:
        return f"{value:.6g}"
    return "none" if value is None else str(value)
