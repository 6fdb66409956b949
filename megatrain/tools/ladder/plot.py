"""The plot of a ladder: loss over training FLOPs, a curve of the law for each size, and the prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from megatrain.tools.ladder.law import Law, Point

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 520, 70, 190, 44, 56
_COLORS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f", "#edc948")
_STYLE: Final = """<style>
  svg { background: #fff; color: #222 } .grid { stroke: #ddd } .target { stroke: #222; fill: #fff }
  @media (prefers-color-scheme: dark) { svg { background: #16181c; color: #ddd } .grid { stroke: #333 } .target { stroke: #eee; fill: #16181c } }
</style>"""


@dataclass(frozen=True)
class Target:
    """The model whose loss is predicted."""

    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class _Axes:
    """Logarithmic scales of FLOPs and loss."""

    flops: tuple[float, float]
    losses: tuple[float, float]

    def x(self, flops: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * _fraction(flops, *self.flops)

    def y(self, loss: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * _fraction(loss, *self.losses)


def _fraction(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def ladder_svg(points: Sequence[Point], law: Law | None, target: Target | None, title: str) -> str:
    """Return the drawing. Without a law it has the points alone, joined by size."""
    flops = [6 * point.parameters * point.tokens for point in points]
    losses = [point.loss for point in points]
    if target is not None:
        flops.append(round(6 * target.parameters * target.tokens))
        losses += [target.low, target.high]
    axes = _Axes((min(flops) / 1.6, max(flops) * 1.6), (min(losses) / 1.03, max(losses) * 1.03))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12" fill="currentColor">',
        _STYLE,
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_grid(axes),
        *_sizes(points, law, axes),
        *([] if target is None else _target(target, axes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    low, high = (math.log10(value) for value in axes.flops)
    step = max(1, math.ceil((high - low) / 8))
    powers = list(range(math.ceil(low), math.floor(high) + 1, step))
    for value, text in [(10.0**power, f"1e{power}") for power in powers] or [(axes.flops[0] * 1.6, "")]:
        x = axes.x(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
    for loss in np.geomspace(*axes.losses, 7)[1:-1]:
        y = axes.y(float(loss))
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">training FLOPs, 6 N D</text>'
    yield f'<text x="16" y="{(_TOP + bottom) / 2}" text-anchor="middle" transform="rotate(-90 16 {(_TOP + bottom) / 2})">loss</text>'


def _sizes(points: Sequence[Point], law: Law | None, axes: _Axes) -> Iterator[str]:
    """Yield a curve, points and an entry of the legend for each size."""
    for number, size in enumerate(sorted({point.parameters for point in points})):
        color = _COLORS[number % len(_COLORS)]
        own = sorted((point for point in points if point.parameters == size), key=lambda point: point.tokens)
        curve = [(6.0 * size * point.tokens, point.loss) for point in own]
        if law is not None:
            tokens = np.geomspace(own[0].tokens, own[-1].tokens, 40)
            curve = [(6 * size * float(count), law.loss(size, count)) for count in tokens]
        path = " ".join(f"{axes.x(flops):.1f},{axes.y(loss):.1f}" for flops, loss in curve)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for point in own:
            x, y = axes.x(6.0 * size * point.tokens), axes.y(point.loss)
            text = f"{point.name}: {point.tokens:,} tokens, loss {point.loss:.4f}"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(text)}</title></circle>'
        y = _TOP + 10 + 20 * number
        yield f'<circle cx="{_WIDTH - _RIGHT + 20}" cy="{y}" r="5" fill="{color}"/>'
        yield f'<text x="{_WIDTH - _RIGHT + 32}" y="{y + 4}">{short(size)} parameters</text>'


def _target(target: Target, axes: _Axes) -> Iterator[str]:
    x = axes.x(6 * target.parameters * target.tokens)
    low, y, high = (axes.y(loss) for loss in (target.low, target.loss, target.high))
    yield f'<line class="target" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke-width="2"/>'
    yield f'<path class="target" d="M{x:.1f} {y - 7:.1f} l7 7 l-7 7 l-7 -7 z" stroke-width="2"/>'
    words = (
        f"{short(target.parameters)} parameters,",
        f"{short(target.tokens)} tokens:",
        f"{target.loss:.3f} ({target.low:.3f} to {target.high:.3f})",
    )
    for number, text in enumerate(words):
        yield f'<text x="{x + 14:.1f}" y="{y + 16 * number - 12:.1f}">{text}</text>'


def short(count: float) -> str:
    """Return a count in three digits, such as 6.74B."""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= power:
            return f"{count / power:.3g}{letter}"
    return f"{count:.3g}"
