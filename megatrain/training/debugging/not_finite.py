"""Where infinities and NaNs come from. Searched only once a step was not finite, by running that step a second time.

    weights ─> data ─> forward of each segment ─> backward of each segment ─> gradients        the first that is wrong

The second pass computes the same again, as dropout is keyed by samples, and looks at what passes between segments;
no gradient is summed over replicas in it, so that each rank sees its own (experts on other ranks see theirs of all).
Ranks that share a segment see the same of what they sum: of them that one is named whose own part was the first that
was wrong, when it left; all, where no part was. What does not come again was no arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import ParamEntry, ParamRegistry
from megatrain.parallel.pipeline.executor import Executor, Segment, Use
from megatrain.parallel.pipeline.schedule import one_forward_one_backward
from megatrain.training.engine import Engine
from megatrain.training.launch.failure import named
from megatrain.training.planning.model_tree import layer_numbers

Stage = Literal["weight", "data", "forward", "backward", "gradient"]
_STAGES: Final[tuple[Stage, ...]] = ("weight", "data", "forward", "backward", "gradient")
_MAX_FINDINGS = 100
_MAX_NAMES = 4
_NEVER: Final = 1 << 30
_LOOK_AT_SAMPLES = (
    "go on from the last checkpoint, with a smaller --lr or --clip-grad; or look at the samples"
)
_FIXES: Final[dict[str, str]] = {
    "weight": "nothing was updated or saved; go on from the last checkpoint, and from an older one if it comes again",
    "data": "nothing was updated or saved; look at these samples, and go on from the last checkpoint",
    "nothing": "nothing was updated or saved; go on from the last checkpoint, and test the hardware if it comes again",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place where something was not finite."""

    stage: Stage
    rank: int
    text: str
    order: int = 0
    """Among those of a stage, the earlier the smaller."""
    left_at: int = _NEVER
    """How many tensors the rank had sent in this pass when one left that was not finite."""
    parameter: str = ""
    """Whose values these are, if they are a parameter's."""
    segment: int = -1
    """Of the rank's, if it is one's."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        return _STAGES.index(self.stage), self.order, self.left_at, self.rank

    def is_like(self, other: Finding) -> bool:
        """Whether it is the same on another rank, or the same one."""
        return self.key[:-1] == other.key[:-1] and self.parameter == other.parameter


def explain(engine: Engine, batches: Sequence[Batch], *, first_sample: int) -> tuple[str, str]:
    """What was not finite first, and what to do about it; equal on all ranks, which all call this."""
    own = sorted(_search(engine, batches, first_sample), key=lambda finding: finding.key)
    findings = [asdict(finding) for finding in own[:_MAX_FINDINGS]]
    what, fix = engine.grid.messages.concluded(findings, _explained)
    return what, fix


def _explained(told: list[list[dict[str, Any]]]) -> tuple[str, str]:
    """By rank 0, of what all ranks have found."""
    found = sorted((Finding(**one) for rank in told for one in rank), key=lambda finding: finding.key)
    if not found:
        return (
            "a second pass over the same samples found nothing wrong, as after a fault of the hardware",
            _FIXES["nothing"],
        )
    first = found[0]
    where = named([one.rank for one in found if one.is_like(first)])
    fix = _FIXES.get(first.stage, f"nothing was updated or saved; {_LOOK_AT_SAMPLES}")
    return f"first on {where}: {first.text}", fix


def _search(engine: Engine, batches: Sequence[Batch], first_sample: int) -> list[Finding]:
    rank = engine.grid.rank
    engine.buffers.clear_gradients()
    found = []
    for bucket, _ in engine.data_parallel.whole_buckets():
        for placed in bucket.placed:
            for name, count in _bad_pieces(placed.entry, placed.entry.parameter.detach()):
                text = f"{count} values of the weight {name}"
                found.append(Finding(stage="weight", rank=rank, text=text, parameter=name))
    batches = engine.own_parts(batches)
    infos = engine.passes(batches, first_sample=first_sample)
    for batch, info in zip(batches, infos, strict=True):
        if not _is_finite(batch.loss_mask):
            text = f"the loss mask of {_samples(batch, info)}"
            found.append(Finding(stage="data", rank=rank, text=text, order=info.microbatch))
    second = _SecondPass(engine)
    second.run(batches, infos)
    found += [second.with_gradients(finding) for finding in second.found]
    for name, count in second.bad_gradients.items():
        text = f"{count} values of the gradient of {name}"
        found.append(Finding(stage="gradient", rank=rank, text=text, parameter=name))
    engine.buffers.clear_gradients()
    return found


class _SecondPass:
    """The step's passes again, with a look at all that comes out of segments. It is the executor's `SegmentHooks`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent = _Sent()
        self.found: list[Finding] = []
        self.bad_gradients: dict[str, int] = {}
        """How many values of a piece's gradient are not finite, once it is complete or where its memory goes."""
        segments = engine.model.segments
        names = [_segment_name(number, engine) for number in range(len(segments))]
        self.watched = [
            _Watched(segment, self, number, name)
            for number, (segment, name) in enumerate(zip(segments, names, strict=True))
        ]

    def run(self, batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        engine, pp = self.engine, self.engine.grid.pp
        executor = Executor(
            self.watched,
            engine.grid,
            hidden_shape=engine.executor.hidden_shape,
            dtype=engine.executor.dtype,
            device=engine.device,
            hooks=self,
        )
        with self.sent:
            executor.run(one_forward_one_backward(pp.rank, pp.size, len(batches)), batches, infos)

    def note(self, stage: Stage, place: int, name: str, batch: Batch, info: PassInfo) -> None:
        """Segment `place` of this pipeline stage made something of finite input that is not finite."""
        pp, count = self.engine.grid.pp, len(self.watched)
        depth = pp.rank * 10_000 + place
        last = pp.size * 10_000 + count
        order = info.microbatch * last + (depth if stage == "forward" else last - depth)
        text = f"the {stage} pass of {name} in micro-batch {info.microbatch}, {_samples(batch, info)}"
        rank, left_at = self.engine.grid.rank, self.sent.first_bad
        self.found.append(
            Finding(stage=stage, rank=rank, text=text, order=order, left_at=left_at, segment=place)
        )

    def with_gradients(self, finding: Finding) -> Finding:
        """Which parameters' gradients the backward pass has spoiled in the segment where it went wrong."""
        entries = self.engine.model.registry.entries.values()
        own = [piece.name for e in entries if e.segment == finding.segment for piece in e.layout.pieces]
        bad = [name for name in own if name in self.bad_gradients]
        if finding.stage != "backward" or not bad:
            return finding
        more = f" and {len(bad) - _MAX_NAMES} more" if len(bad) > _MAX_NAMES else ""
        text = f"{finding.text}; with it the gradients of {', '.join(bad[:_MAX_NAMES])}{more}"
        return dataclasses.replace(finding, text=text)

    def expect(self, uses: Sequence[Use]) -> None:
        """See `SegmentHooks`."""
        self.engine.data_parallel.expect(uses)

    def before(self, use: Use) -> None:
        """See `SegmentHooks`."""
        self.engine.data_parallel.before(use)

    def after(self, use: Use) -> None:
        """See `SegmentHooks`."""
        self.engine.data_parallel.after(use)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`. Gradients stay this rank's own; where they are not kept whole, they are dropped again."""
        buffers, memory = self.engine.buffers, self.engine.buffers.gradient_memory
        for number in buffers.buckets_of(segment):
            is_kept = memory.is_kept_whole(number)
            if segment != buffers.buckets[number].users[0] or (is_kept and not is_last):
                continue
            for placed in buffers.buckets[number].placed:
                gradient = placed.entry.module.weight_grads[placed.entry.attribute]
                for name, count in _bad_pieces(placed.entry, gradient):
                    self.bad_gradients[name] = max(count, self.bad_gradients.get(name, 0))
            memory.release(number)


class _Sent(TorchDispatchMode):
    """Looks at what this rank gives away while it is entered: ranks of one group send in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.first_bad = 0, _NEVER

    def begin(self) -> None:
        """Another pass through a segment begins."""
        self.count, self.first_bad = 0, _NEVER

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            for tensor in _given_away(func, args):
                if self.first_bad == _NEVER and not _is_finite(tensor):
                    self.first_bad = self.count
                self.count += 1
        return func(*args, **(kwargs or {}))


def _given_away(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """What a rank's part in a collective is, before others see it."""
    schema = func._schema  # noqa: SLF001 (torch tells an operation's arguments nowhere else)
    if schema.name == "c10d::recv_":
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.name.startswith(("input", "tensors")):
            yield from (value,) if isinstance(value, Tensor) else value


class _Watched:
    """A segment whose output, and gradients on both sides, are looked at."""

    def __init__(self, segment: Segment, second: _SecondPass, number: int, name: str) -> None:
        self.segment, self.second, self.number, self.name = segment, second, number, name

    def __call__(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
        sent = self.second.sent
        sent.begin()
        output = self.segment(hidden, batch, info)
        if not _is_finite(output) and (hidden is None or _is_finite(hidden)):
            self.second.note("forward", self.number, self.name, batch, info)
        arrived_finite: list[bool] = []

        def begin(gradient: Tensor) -> None:
            sent.begin()
            arrived_finite.append(_is_finite(gradient))

        output.register_hook(begin)

        def look(gradient: Tensor) -> None:
            if arrived_finite[-1] and not _is_finite(gradient):
                self.second.note("backward", self.number, self.name, batch, info)

        if hidden is not None:
            hidden.register_hook(look)
        return output


def _bad_pieces(entry: ParamEntry, tensor: Tensor) -> Iterator[tuple[str, int]]:
    """Canonical names of what is not finite in a parameter or its gradient, and how many values of each."""
    if _is_finite(tensor):
        return
    for piece in entry.layout.pieces:
        rows = tensor[piece.row : piece.row + piece.local_shape[0]]
        count = int((~rows.isfinite()).sum())
        if count:
            yield piece.name, count


def _segment_name(number: int, engine: Engine) -> str:
    """Which layers a segment is, by the canonical names of its parameters."""
    entries = {name: e for name, e in engine.model.registry.entries.items() if e.segment == number}
    layers = layer_numbers(ParamRegistry(entries))
    if layers:
        return f"decoder.layers.{layers[0]}" + (f" to {layers[-1]}" if len(layers) > 1 else "")
    return "the head" if number else "the embedding" if engine.grid.pp.is_first else "the head"


def _samples(batch: Batch, info: PassInfo) -> str:
    last = info.first_sample + batch.tokens.shape[0] - 1
    return f"samples {info.first_sample} to {last}"


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
