"""`megatrain plan pipeline`: simulate every schedule and split for given times, print a table, draw the best one.

times of a layer, of the head, of a message ─> schedules x chunks x splits ─> simulator ─> table, SVG
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Final

from megatrain.config.errors import ConfigError
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, flags_of_schedule
from megatrain.config.subjects.pipeline import balanced_split
from megatrain.parallel.pipeline.actions import Action, ActionKind
from megatrain.parallel.pipeline.schedule import PipelineSchedule, placement_of
from megatrain.parallel.pipeline.simulator import Simulation, StageCosts, simulate
from megatrain.tools.subcommands import write_output

_UNITS = 10**6
"""Cost of a layer in balanced splits, whose costs are integers."""
_SEVERAL: Final = (2, 3, 4, 6, 8)
_CHUNKS: Final = {
    name: _SEVERAL if traits.num_chunks is None else (traits.num_chunks,)
    for name, traits in PIPELINE_SCHEDULES.items()
}
"""Model chunks per rank to simulate."""


@dataclass(frozen=True)
class Case:
    """Sizes and times. Times are in any unit, the times of the head in multiples of a layer's."""

    ranks: int
    layers: int
    microbatches: int
    forward: float
    backward: float
    weight_gradient: float
    head: float
    transfer: float
    combined: float = 1.0
    """Time of a forward and a backward pass that run together, as a fraction of the sum."""


@dataclass(frozen=True)
class Candidate:
    """A schedule with a split of the layers, and its simulation."""

    schedule: PipelineSchedule
    counts: tuple[int, ...]
    """Layers of each virtual stage."""
    simulation: Simulation

    @property
    def peak_layers(self) -> int:
        """Upper bound of the layers whose activations a rank holds: passes in flight times layers of its largest chunk."""
        placement = self.schedule.placement
        largest = [
            max(self.counts[placement.stage(rank, chunk)] for chunk in range(placement.num_chunks))
            for rank in range(placement.num_ranks)
        ]
        return max(a * b for a, b in zip(self.simulation.peak_activations, largest, strict=True))

    @property
    def flags(self) -> str:
        """The flags of pretrain.py."""
        placement, chunks = self.schedule.placement, self.schedule.placement.num_chunks
        words = [flags_of_schedule(self.schedule.kind, chunks)]
        if len(set(self.counts)) > 1:
            stages = ["t" * count for count in self.counts]
            stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
            words.append(f'--pipeline-model-parallel-layout "{_shortened(stages)}"')
        return " ".join([f"--pipeline-model-parallel-size {placement.num_ranks}", *words])


def run(arguments: argparse.Namespace) -> None:
    """Simulate every pipeline schedule and split of the layers; print a table, the fastest first."""
    case = Case(**{field.name: getattr(arguments, field.name) for field in fields(Case)})
    if arguments.schedule not in (None, *_CHUNKS):
        raise ConfigError(f"--schedule {arguments.schedule} is no schedule", fix=f"use {', '.join(_CHUNKS)}")
    found = [one for one in candidates(case) if arguments.schedule in (None, one.schedule.kind)]
    found.sort(key=lambda one: (one.simulation.duration, one.peak_layers))
    if not found:
        chunks = min(_CHUNKS.get(arguments.schedule, (1,)))
        raise ConfigError(
            f"--layers {case.layers} are too few for --ranks {case.ranks}",
            fix=f"use --ranks {(case.layers + 1) // chunks} or fewer",
        )
    print(f"{'time':>10}  {'bubble':>6}  {'layers held':>11}  flags")
    for one in found:
        simulation = one.simulation
        print(
            f"{simulation.duration:>10.4g}  {simulation.bubble_fraction:>6.1%}  {one.peak_layers:>11}  {one.flags}"
        )
    if arguments.output is not None:
        best = found[0]
        text = timeline_svg(best.simulation, best.flags)
        write_output(arguments.output, text)
        print(f"timeline of the first line: {arguments.output}")


def candidates(case: Case) -> Iterator[Candidate]:
    """Yield every schedule with an equal split, where there is one, and the balanced split."""
    for kind, chunks in ((kind, chunks) for kind, numbers in _CHUNKS.items() for chunks in numbers):
        placement = placement_of(kind, case.ranks, chunks)
        stages = placement.num_stages
        if stages > case.layers + 1 or case.ranks == 1 < stages:
            continue
        splits = {balanced_split([_UNITS] * case.layers, round(_UNITS * case.head), stages)[1]}
        if case.layers % stages == 0:
            splits.add((case.layers // stages,) * stages)
        for counts in sorted(splits):
            schedule = PipelineSchedule(kind, placement)
            actions = [schedule.training(rank, case.microbatches) for rank in range(case.ranks)]
            yield Candidate(schedule, counts, simulate(actions, _costs(case, counts), placement))


def _costs(case: Case, counts: Sequence[int]) -> StageCosts:
    units = [*counts[:-1], counts[-1] + case.head]
    forward, backward, weight = (
        [time * size for size in units] for time in (case.forward, case.backward, case.weight_gradient)
    )
    return StageCosts(forward, backward, weight, case.transfer, [case.combined] * len(units))


def _shortened(stages: Sequence[str]) -> str:
    """Return the stages in the notation of --pipeline-model-parallel-layout, with `*N` for repeated letters and stages."""
    parts: list[tuple[str, int]] = []
    for stage in stages:
        letters = stage.count("t")
        text = stage.replace("t" * letters, f"t*{letters}") if letters > 3 else stage
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1] + 1)
        else:
            parts.append((text, 1))
    words = [f"{text}|" if count == 1 else f"({text}|)*{count}" for text, count in parts]
    return "".join(words).removesuffix("|")


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
