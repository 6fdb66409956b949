"""Render a plan as text. Short: given values with their source, derived values with their reason. Full: every setting.

given by run.yaml
  model         num_layers 12, hidden_size 768, num_attention_heads 12, swiglu on
  training      micro_batch_size 4, train_iters 1000
given on the command line
  optimizer     lr 0.003
derived
  ffn_hidden_size     2048        4 * hidden size 768 * 2/3, down to a multiple of 64 (gated)
changes the result
  --hidden-dropout 0.1 by default, as in Megatron-LM; most models are trained with 0 today
changes nothing: 3 notes, listed by --print-config full
"""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.megatron.differences import default_differences
from megatrain.config.plan import Plan
from megatrain.config.plan_note import GRADES, by_grade
from megatrain.config.schema.tree import in_words, settings
from megatrain.config.schema.values import AUTO

_WIDTH: Final = 100
_NO_BREAK: Final = "\u00a0"
_SHOWN_IN_FULL_ONLY: Final = frozenset(
    f"derived.{name}"
    for name in (
        "world_size",
        "startup_timeout_seconds",
        "collective_timeout_seconds",
        "num_eval_microbatches",
        "requested_train_samples",
        "requested_valid_samples",
        "requested_test_samples",
        "vocab_size",
        "eod_id",
        "start_iteration",
        "start_consumed_samples",
    )
) | {
    "model.heterogeneous_layers_config_encoded_json",
    "data.data_cache_path",
    "training.eval_global_batch_size",
    "training.eval_micro_batch_size",
}
"""Values that only --print-config full shows."""
_HIDDEN_IF_EQUAL: Final = (
    ("derived.graphs_in_turn", False),
    ("vision.vision_projection_norm", False),
    ("derived.kv_copies", 1),
    ("derived.fp8_layers", ()),
    ("derived.phase_transitions", ()),
    ("derived.train_start", 0),
    ("derived.later_phases", ()),
    ("derived.pack_group_sizes", ()),
    ("derived.tower_layers", ()),
)
"""Values that are hidden while they have this value. None is hidden too."""


@dataclass(frozen=True)
class _Row:
    name: str
    value: str
    source: str


def render_plan(plan: Plan) -> str:
    """Render the plan as `--print-config` asks for, followed by the notes by grade. No colours."""
    is_full = plan.config.logging.print_config == "full"
    lines = _every_setting(plan) if is_full else [*_given(plan), *_derived(plan), _defaults_line(plan)]
    for grade, notes in by_grade((*plan.notes, *default_differences(plan))).items():
        if grade == "nothing" and not is_full:
            count = f"{len(notes)} note{'s' if len(notes) > 1 else ''}"
            lines.append(f"{GRADES[grade]}: {count}, listed by --print-config full")
            continue
        lines.append(GRADES[grade])
        for note in notes:
            lines += _wrapped(note, "  ", "    ")
    return "\n".join(lines) + "\n"


def _given(plan: Plan) -> list[str]:
    """Render the given settings by file or command line, with a paragraph per section.

    A file may contain all settings, as `config.yaml` of a run does: its defaults, and `none` for `auto`, are counted, not listed.
    """
    defaults = {setting.path: setting.default for setting in settings()}
    as_default: Counter[str] = Counter()
    sources: dict[str, dict[str, list[str]]] = {}
    for path, origin in plan.origins.items():
        if not origin.is_given_or_stored:
            continue
        source = {
            "flag": "on the command line",
            "yaml": f"by {origin.detail.rpartition(':')[0]}",
            "checkpoint": f"by the checkpoint {origin.detail}",
            "folder": f"by {origin.detail} (--from-hf)",
        }[origin.kind]
        value = plan.config.get(path)
        if origin.kind == "yaml" and (value == defaults[path] or (value is None and defaults[path] is AUTO)):
            as_default[source] += 1
            continue
        section, name = path.split(".")
        shown = f"{name}{_NO_BREAK}{_shown(value)}"
        sources.setdefault(source, {}).setdefault(section, []).append(shown)
    lines = []
    for source in sorted(sources, key=lambda source: source == "on the command line"):
        lines.append(f"given {source}")
        for section, values in sources[source].items():
            lines += _wrapped(", ".join(values), f"  {section:<12}  ", " " * 16)
        if as_default[source]:
            lines.append(f"  and {as_default[source]} with their default value")
    return lines


def _derived(plan: Plan) -> list[str]:
    """Render derived values, except those that repeat a setting."""
    rows = []
    for path, origin in plan.origins.items():
        section, name = path.split(".")
        is_repeated = path in _SHOWN_IN_FULL_ONLY or origin.detail.startswith(("equals --", "--"))
        if origin.kind != "derived" or is_repeated:
            continue
        holder = plan.derived if section == "derived" else getattr(plan.config, section)
        value = getattr(holder, name)
        is_one_plan = section == "derived" and name.endswith("_plan") and len(value) == 1
        if not is_one_plan and value is not None and (path, value) not in _HIDDEN_IF_EQUAL:
            rows.append(_Row(name, _shown(value), origin.detail))
    return ["derived", *_table(rows)]


def _defaults_line(plan: Plan) -> str:
    num_defaults = sum(origin.kind == "default" for origin in plan.origins.values())
    text = f"{num_defaults} settings have their defaults: --print-config full shows them"
    return text + (", as does config.yaml in --save" if plan.config.checkpoint.save is not None else "")


def _every_setting(plan: Plan) -> list[str]:
    sections: dict[str, list[_Row]] = {}
    for path, origin in plan.origins.items():
        section, name = path.split(".")
        holder = plan.derived if section == "derived" else getattr(plan.config, section)
        source = origin.detail if section == "derived" else str(origin)
        sections.setdefault(section, []).append(_Row(name, _shown(getattr(holder, name)), source))
    sections["derived"] = sections.pop("derived", [])
    return [line for section, rows in sections.items() for line in (section, *_table(rows))]


def _table(rows: Sequence[_Row]) -> list[str]:
    if not rows:
        return []
    name_width = max(len(row.name) for row in rows)
    value_width = min(24, max(len(row.value) for row in rows))
    return [line for row in rows for line in _row_lines(row, name_width, value_width)]


def _row_lines(row: _Row, name_width: int, value_width: int) -> list[str]:
    """Render a row on one line, or several if the source is long. After a long value, the source starts a new line."""
    head = f"  {row.name:<{name_width}}  {row.value:<{value_width}}  "
    margin = " " * (name_width + value_width + 6)
    if len(head) > len(margin):
        return [head.rstrip(), *_wrapped(row.source, margin, margin)]
    return _wrapped(row.source, head, margin)


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    """Wrap `text` without breaking flags, file names, or a setting and its value."""
    lines = textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=margin,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int) and value >= 10**15 else in_words(value)
