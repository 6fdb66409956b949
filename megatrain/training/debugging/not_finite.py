"""Search for the source of infinities and NaNs. It runs only after a step that was not finite, and repeats that step.

    weights ─> data ─> forward of each segment ─> backward of each segment ─> gradients      the first finding is reported

The second run computes the same values, because dropout is keyed by samples. It checks the outputs of all segments and
does not reduce gradients over replicas, so that each rank sees its own gradients (for experts, the gradients of its expert-parallel group).
Ranks that share a segment see the same sums. The search names the rank among them whose own contribution to a
collective was the first non-finite one, or all of them if every contribution was finite. If the second run finds
nothing, the cause is not arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.layout import ParamEntry, ParamRegistry
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.segments import Segment, SegmentHooks
from megatrain.training.distillation.teacher import after_teacher
from megatrain.training.engine import Engine
from megatrain.training.liveness.failure import format_ranks
from megatrain.training.planning.model_tree import STACK_END, layers_of

Stage = Literal["weight", "data", "forward", "backward", "gradient"]
_STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
_MAX_FINDINGS = 100
_MAX_NAMES = 4
_NEVER: Final = 1 << 30
_ARITHMETIC_FIX = "resume from the last checkpoint with a smaller --lr or --clip-grad, or inspect the samples"
_FIXES: Final[dict[str, str]] = {
    "weight": "resume from the last checkpoint, or from an older one with --ckpt-step N if the error repeats",
    "data": "inspect these samples, and resume from the last checkpoint",
    "nothing": "resume from the last checkpoint, and test the hardware if the error repeats",
}
_UNCHANGED = "; nothing was updated or saved"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One value of the step that was not finite."""

    stage: Stage
    rank: int
    text: str
    order: int = 0
    """Position in time within the stage."""
    first_bad_input: int = _NEVER
    """Number of the first collective input of this rank that was not finite, within the pass."""
    parameter: str = ""
    """Name of the parameter, if the finding is in one."""
    segment: int = -1
    """Number of the rank's segment, if the finding is in one."""

    @property
    def key(self) -> tuple[int, int, int, int]:
        return _STAGES.index(self.stage), self.order, self.first_bad_input, self.rank

    def is_same_on_another_rank(self, other: Finding) -> bool:
        """Return whether the findings differ at most in their rank."""
        return self.key[:-1] == other.key[:-1] and self.parameter == other.parameter


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The first finding of all ranks."""

    where: str
    fix: str
    ranks: Sequence[int] = ()
    """The ranks that have it; none if the second run was finite."""


def explain(engine: Engine, batches: Sequence[Batch], *, first_sample: int) -> Explanation:
    """Return the first finding of all ranks. All ranks call this and get the same answer."""
    own = sorted(_search(engine, batches, first_sample), key=lambda finding: finding.key)
    findings = [asdict(finding) for finding in own[:_MAX_FINDINGS]]
    return Explanation(**engine.grid.messages.gather_and_broadcast(findings, _conclude))


def _conclude(by_rank: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the explanation from the findings of all ranks; rank 0 calls it."""
    found = sorted(
        (Finding(**one) for findings in by_rank for one in findings), key=lambda finding: finding.key
    )
    if not found:
        where = "a second run of the same step was finite, as after a hardware fault"
        return {"where": where, "fix": _FIXES["nothing"] + _UNCHANGED}
    first = found[0]
    ranks = [one.rank for one in found if one.is_same_on_another_rank(first)]
    fix = _FIXES.get(first.stage, _ARITHMETIC_FIX) + _UNCHANGED
    return {"where": f"first on {format_ranks(ranks)}: {first.text}", "fix": fix, "ranks": ranks}


def _search(engine: Engine, batches: Sequence[Batch], first_sample: int) -> list[Finding]:
    rank = engine.grid.rank
    engine.buffers.gradients.zero()
    found = []
    for bucket, _ in engine.data_parallel.gathered_buckets():
        for param in bucket.params:
            for name, count in _bad_pieces(param.entry, param.entry.parameter.detach()):
                text = f"{count} values of the weight {name}"
                found.append(Finding(stage="weight", rank=rank, text=text, parameter=name))
    batches = engine.shard_batches(batches)
    infos = engine.pass_infos(batches, first_sample=first_sample)
    for batch, info in zip(batches, infos, strict=True):
        if not _is_finite(batch.loss_mask):
            text = f"the loss mask of {_sample_range(batch, info)}"
            found.append(Finding(stage="data", rank=rank, text=text, order=info.microbatch))
    second = _SecondRun(engine)
    second.run(batches, infos)
    found += [second.with_gradients(finding) for finding in second.found]
    for name, count in second.bad_gradients.items():
        text = f"{count} values of the gradient of {name}"
        found.append(Finding(stage="gradient", rank=rank, text=text, parameter=name))
    engine.buffers.gradients.zero()
    return found


class _SecondRun(SegmentHooks):
    """The repetition of a step, with checks of all outputs of segments, and its hooks."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.data_parallel)
        self.engine = engine
        self.inputs = _CollectiveInputs()
        self.found: list[Finding] = []
        self.bad_gradients: dict[str, int] = {}
        """Number of values that are not finite, by piece; counted when the gradient is complete or before it is freed."""
        segments = engine.model.segments
        names = [_segment_name(number, engine) for number in range(len(segments))]
        self.segments = [
            _CheckedSegment(segment, self, number, name)
            for number, (segment, name) in enumerate(zip(segments, names, strict=True))
        ]

    def run(self, batches: Sequence[Batch], infos: Sequence[PassInfo]) -> None:
        engine = self.engine
        executor = Executor(
            self.segments,
            engine.grid,
            hidden_shape=engine.executor.hidden_shape,
            dtype=engine.executor.dtype,
            device=engine.device,
            hooks=self,
            chunks=engine.model.chunks,
            placement=engine.model.placement,
            hidden_rows=engine.executor.hidden_rows,
        )
        passes = after_teacher(executor, engine.model)
        with self.inputs:
            passes.run(engine.pipeline.training(engine.grid.pp.rank, len(batches)), batches, infos)

    def add_finding(self, stage: Stage, number: int, name: str, batch: Batch, info: PassInfo) -> None:
        """Add that segment `number` of this pipeline stage computed values that are not finite from finite input."""
        model, placement = self.engine.model, self.engine.model.placement
        chunk = next(index for index, segments in enumerate(model.chunks) if number in segments)
        depth = placement.stage(self.engine.grid.pp.rank, chunk) * 10_000 + number
        last = placement.num_stages * 10_000 + len(self.segments)
        order = info.microbatch * last + (depth if stage == "forward" else last - depth)
        text = f"the {stage} pass of {name} in micro-batch {info.microbatch}, {_sample_range(batch, info)}"
        rank, first_bad_input = self.engine.grid.rank, self.inputs.first_bad
        self.found.append(
            Finding(
                stage=stage,
                rank=rank,
                text=text,
                order=order,
                first_bad_input=first_bad_input,
                segment=number,
            )
        )

    def with_gradients(self, finding: Finding) -> Finding:
        """Return the finding with the names of the segment's gradients that are not finite, for a backward pass."""
        entries = self.engine.model.registry.entries.values()
        own = [piece.name for e in entries if e.segment == finding.segment for piece in e.layout.pieces]
        bad = [name for name in own if name in self.bad_gradients]
        if finding.stage != "backward" or not bad:
            return finding
        more = f" and {len(bad) - _MAX_NAMES} more" if len(bad) > _MAX_NAMES else ""
        text = f"{finding.text}; affected gradients: {', '.join(bad[:_MAX_NAMES])}{more}"
        return dataclasses.replace(finding, text=text)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        """See `SegmentHooks`. Check gradients without reducing them, and free those that are not kept in full."""
        buffers, memory = self.engine.buffers, self.engine.buffers.gradients
        for number in buffers.buckets_of.get(segment, ()):
            is_kept = memory.is_kept_full[number]
            if segment != buffers.buckets[number].completed_by or (is_kept and not is_last):
                continue
            if not is_kept:
                memory.complete(number)
            for param in buffers.buckets[number].params:
                gradient = param.entry.module.weight_grads[param.entry.attribute]
                for name, count in _bad_pieces(param.entry, gradient):
                    self.bad_gradients[name] = max(count, self.bad_gradients.get(name, 0))
            memory.free(number)


class _CollectiveInputs(TorchDispatchMode):
    """Checks this rank's inputs of collectives. Ranks of one group call collectives in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.first_bad = 0, _NEVER

    def begin(self) -> None:
        """Restart the count for another pass through a segment."""
        self.count, self.first_bad = 0, _NEVER

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            for tensor in _collective_inputs(func, args):
                if self.first_bad == _NEVER and not _is_finite(tensor):
                    self.first_bad = self.count
                self.count += 1
        return func(*args, **(kwargs or {}))


def _collective_inputs(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield this rank's input tensors of a collective."""
    schema = func._schema  # noqa: SLF001 (torch has no public access to the names of arguments)
    if schema.name == "c10d::recv_":
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if argument.name.startswith(("input", "tensors")):
            yield from (value,) if isinstance(value, Tensor) else value


class _CheckedSegment:
    """A segment with checks of its output and of the gradients of its output and input."""

    def __init__(self, segment: Segment, second: _SecondRun, number: int, name: str) -> None:
        self.segment, self.second, self.number, self.name = segment, second, number, name

    def __call__(self, hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
        inputs = self.second.inputs
        inputs.begin()
        output = self.segment(hidden, batch, info)
        if not _is_finite(output) and (hidden is None or _is_finite(hidden)):
            self.second.add_finding("forward", self.number, self.name, batch, info)
        finite_gradients: list[bool] = []

        def check_output_gradient(gradient: Tensor) -> None:
            inputs.begin()
            finite_gradients.append(_is_finite(gradient))

        output.register_hook(check_output_gradient)

        def check_input_gradient(gradient: Tensor) -> None:
            if finite_gradients[-1] and not _is_finite(gradient):
                self.second.add_finding("backward", self.number, self.name, batch, info)

        if hidden is not None:
            hidden.register_hook(check_input_gradient)
        return output


def _bad_pieces(entry: ParamEntry, tensor: Tensor) -> Iterator[tuple[str, int]]:
    """Yield the canonical name of each piece that is not finite, and its number of such values."""
    if _is_finite(tensor):
        return
    for piece in entry.layout.pieces:
        rows = tensor[piece.row : piece.row + piece.local_shape[0]]
        count = int((~rows.isfinite()).sum())
        if count:
            yield piece.name, count


def _segment_name(number: int, engine: Engine) -> str:
    """Return the name of a segment, by the canonical names of its parameters."""
    entries = {name: e for name, e in engine.model.registry.entries.items() if e.segment == number}
    layers = layers_of(ParamRegistry(entries))
    if layers:
        first, last = layers[0], layers[-1]
        return f"{first.stack}.layers.{first.number}" + (f" to {last.number}" if len(layers) > 1 else "")
    names = [piece.name for entry in entries.values() for piece in entry.layout.pieces]
    if STACK_END in names and "output_layer.bias" not in names:
        return "the embedding of the decoder"
    depth = next((name for name in names if name.startswith("mtp.")), None)
    if depth is not None:
        return ".".join(depth.split(".")[:3])
    is_embedding = number == 0 and engine.model.placement.rank(0) == engine.grid.pp.rank
    return "the embedding" if is_embedding else "the head"


def _sample_range(batch: Batch, info: PassInfo) -> str:
    first = info.first_sample // info.pieces
    return f"samples {first} to {first + batch.tokens.shape[0] // info.pieces - 1}"


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())
