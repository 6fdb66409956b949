"""Timelines of pipeline schedules as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.simulator import Simulation

_WIDTH, _ROW, _LEFT, _TOP = 1600, 26, 64, 56
_COLORS: Final = {
    ActionKind.FORWARD: ("#4e79a7", "#a0c4e8", "#2f4f6f", "#c9def2"),
    ActionKind.BACKWARD: ("#59a14f", "#a6d49f", "#386632", "#d0ead0"),
    ActionKind.WEIGHT: ("#edc948", "#f6e3a1", "#a88a1d", "#fbf2d3"),
}
"""Colors of a kind of pass, by model chunk."""
_NAMES: Final = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.WEIGHT: "weight gradients",
}
_MIN_LABEL_WIDTH: Final = 14


def timeline_svg(simulation: Simulation, title: str) -> str:
    """Return a drawing: a row per rank, a box per pass with its micro-batch, shades by model chunk.

    The passes of a combined action are one above the other.
    """
    height = _TOP + _ROW * len(simulation.spans) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>',
        *_legend(),
        *(line for rank in range(len(simulation.spans)) for line in _row(simulation, rank)),
        f'<text x="{_LEFT}" y="{height - 8}">time {simulation.duration:.4g}, bubble {simulation.bubble_fraction:.1%}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    for index, (kind, name) in enumerate(_NAMES.items()):
        x = _LEFT + 170 * index
        yield f'<rect x="{x}" y="26" width="12" height="12" fill="{_COLORS[kind][0]}"/>'
        yield f'<text x="{x + 18}" y="36">{name}</text>'
    yield f'<text x="{_LEFT + 170 * len(_NAMES)}" y="36">other shades: later model chunks</text>'


def _row(simulation: Simulation, rank: int) -> Iterator[str]:
    y = _TOP + _ROW * rank
    yield f'<text x="8" y="{y + 16}">rank {rank}</text>'
    for span in simulation.spans[rank]:
        passes = span.action.passes
        height = (_ROW - 4) / len(passes)
        for number, one in enumerate(passes):
            scale = (_WIDTH - _LEFT - 8) / simulation.duration
            yield from _box(one, span.start * scale, span.end * scale, y + number * height, height)


def _box(one: Action, start: float, end: float, y: float, height: float) -> Iterator[str]:
    shades = _COLORS[one.kind]
    x, width = _LEFT + start, end - start
    color = shades[one.chunk % len(shades)]
    yield (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{color}" stroke="white"'
        ' stroke-width="0.5"/>'
    )
    if width >= _MIN_LABEL_WIDTH:
        size = ' font-size="9"' if height < _ROW / 2 else ""
        center, base = x + width / 2, y + height / 2 + (3 if size else 4)
        yield f'<text x="{center:.2f}" y="{base:g}" text-anchor="middle"{size}>{one.microbatch}</text>'
