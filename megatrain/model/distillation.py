"""Distillation in the head and in chosen layers: divergence of logits and distances of hidden states from a teacher's.

    teacher's final hidden states ──> its logits, a chunk at a time ─┐
    student's logits of the chunk ──────────────────────────────────┴─> divergence and its gradient      (vocabulary-parallel)
    outputs of a pair of layers ──> projection, if widths differ ──> cosine or mean square per token

Logits of neither are gathered, and those of the teacher live as long as their chunk. Losses count the tokens of the loss mask,
with the divisor of the cross-entropy. Evaluation computes none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from megatrain.config.model_spec.distillation import PROJECTION_PREFIX, DistillationSpec, LayerPair
from megatrain.config.model_spec.model import ModelSpec
from megatrain.kernels.cross_entropy import chunk_rows, cross_entropy_backward
from megatrain.kernels.divergence import divergence_gradient, divergences, rescaled, statistics
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.kernels.fused.launching import is_fused
from megatrain.kernels.linear import linear
from megatrain.model.functions import weight_of
from megatrain.model.head import Head
from megatrain.model.layer_context import LayerRanks
from megatrain.model.layouts import replicated_layout
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import (
    TensorParallel,
    TokenLosses,
    VocabShard,
    vocab_parallel_cross_entropy,
    vocab_parallel_logits_gradient,
)

_PART_BYTES = 1 << 28
"""Most bytes of a tensor of logits in the accumulation dtype; five live at a time."""


class TeacherHead(Head):
    """The last segment of a teacher: keeps its input of the output layer, and computes logits of chunks."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.found: dict[int, Tensor] = {}
        """Outputs of the final norm by micro-batch, [s/tp, b, h]."""

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:  # noqa: ARG002 (the signature of a segment)
        self.found[info.microbatch] = self._normed(hidden, info)
        return hidden.new_zeros(())

    @property
    def vocab(self) -> VocabShard:
        """This rank's part of the vocabulary."""
        return VocabShard(self.tp.group, self._output().weight.shape[0], self.vocab_size)

    def rows(self, normed: Tensor, info: PassInfo) -> Tensor:
        """Return the input of the output layer, [t, h]."""
        return self._whole_rows(normed, info)

    def chunk_logits(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of the logits of some rows, [t, v/tp]."""
        return self.scaling.logits(linear(rows, self._output().weight, getattr(self, "bias", None)))


class KeptLayer(nn.Module):
    """A layer of a teacher that keeps its outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.found: dict[int, Tensor] = {}
        """Outputs by micro-batch, [s/tp, b, h]."""

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        y: Tensor = self.layer(hidden, batch, info)
        self.found[info.microbatch] = y
        return y


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of a teacher for a micro-batch on this rank."""

    normed: Tensor
    """Output of its final norm, [s/tp, b, h]."""
    layers: dict[int, Tensor] = field(default_factory=dict)
    """Outputs of layers that pairs name, by their number, [s/tp, b, h]."""


class TopTargets(NamedTuple):
    """The k most likely tokens of a teacher for each of this rank's t tokens, in order [s, b]."""

    ids: Tensor
    """int64 [t, k]."""
    log_probabilities: Tensor
    """[t, k]."""
    log_rest: Tensor
    """Log of the probability of all other tokens, [t]."""
    is_right: Tensor
    """False for tokens of a sample with other tokens than those that the teacher has seen, bool [t]."""


class CachedTeacher(Protocol):
    """Outputs that a teacher has computed before."""

    def targets(self, batch: Batch, info: PassInfo) -> TopTargets:
        """Return those of the micro-batch of this pass."""


class Teacher(Protocol):
    """A model whose outputs are matched."""

    @property
    def head(self) -> TeacherHead:
        """Its last segment, on the rank that has it."""

    def outputs(self, batch: Batch, info: PassInfo) -> TeacherOutputs:
        """Return the outputs of the micro-batch of this pass; computes them if they are not known."""


@dataclass(eq=False)
class Distillation:
    """The teacher of a rank and the weights of losses of the micro-batch in flight."""

    spec: DistillationSpec
    teacher: Teacher | None
    cp: RankGroup
    cached: CachedTeacher | None = None
    """In place of a teacher."""
    layer_weight: Tensor | float = 1.0
    """Factor on the mean of the layer pairs, which the head's forward pass computes before their backward passes."""

    @property
    def sum_names(self) -> list[str]:
        """Names of the sums of losses that the student writes to `PassInfo.sums`."""
        return ["kd_loss", *(f"kd_pair_{k}" for k in range(len(self.spec.pairs)))]

    def head(self, *arguments: Any) -> Head:
        """Return the last segment of the student."""
        return DistilledHead(*arguments, distillation=self)

    def layer(self, number: int, layer: nn.Module, spec: ModelSpec, ranks: LayerRanks) -> nn.Module:
        """Return a layer of the student with the losses of its pairs, if it has some."""
        pairs = [k for k, pair in enumerate(self.spec.pairs) if pair.student == number]
        losses = [
            PairLoss(self, k, spec.hidden_size, spec.init_std, ranks.split.tp, ranks.dtype) for k in pairs
        ]
        return MatchedLayer(layer, losses) if losses else layer


class PairLoss(ShardedModule):
    """The distance between the outputs of a pair of layers: 1 - cosine, or the mean square of the difference.

    Args:
        number: of the pair.
        width: channels of the student.
    """

    def __init__(
        self,
        distillation: Distillation,
        number: int,
        width: int,
        init_std: float,
        tp: TensorParallel,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.distillation, self.number, self.tp = distillation, number, tp
        wide = distillation.spec.model.hidden_size
        if wide != width:
            name = f"{PROJECTION_PREFIX}{number}.projection.weight"
            self.add_weight(
                "projection", replicated_layout([(name, wide)], width, Init(std=init_std), tp), dtype
            )

    @property
    def pair(self) -> LayerPair:
        return self.distillation.spec.pairs[self.number]

    def forward(self, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Return the scaled loss of the output x [s/tp, b, h], without the weight of pairs; write its sum to `info.sums`."""
        assert self.distillation.teacher is not None, "a rule: cached outputs have no layers"
        outputs = self.distillation.teacher.outputs(batch, info)
        target = outputs.normed if self.pair.teacher is None else outputs.layers[self.pair.teacher]
        losses = self._losses(x, target)
        rows, kind = x.shape[0], losses.dtype
        first = self.tp.first_row(rows)
        counted = losses * batch.loss_mask.t()[first : first + rows]
        total = counted.sum()
        found = total.detach().clone()
        info.sums[f"kd_pair_{self.number}"] = (
            all_reduce(found, self.tp.group) if self.tp.sequence_parallel else found
        )
        return total * _scale(batch, info, kind) / len(self.distillation.spec.pairs)

    def _losses(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each token, [s/tp, b]."""
        if hasattr(self, "projection"):
            weight = weight_of(self, "projection")
            x = F.linear(x.to(weight.dtype), weight)
        kind = accumulation_dtype(x.dtype)
        x, target = x.to(kind), target.detach().to(kind)
        if self.pair.loss == "cosine":
            return 1 - F.cosine_similarity(x, target, dim=-1)
        return (x - target).square().mean(-1)


class MatchedLayer(nn.Module):
    """A layer whose output is also matched to a teacher's: the output carries the gradient of the losses."""

    def __init__(self, layer: nn.Module, losses: Sequence[PairLoss]) -> None:
        super().__init__()
        self.layer, self.losses = layer, nn.ModuleList(losses)

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        y: Tensor = self.layer(hidden, batch, info)
        if info.is_training:
            for loss in self.losses:
                y = _WithLoss.apply(y, loss(y, batch, info), loss.distillation)
        return y


class _WithLoss(Function):
    """Return x; its backward pass adds the gradient of a loss, times the weight that the head has computed meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, distillation: Distillation) -> Tensor:
        ctx.distillation, ctx.kind, ctx.device = distillation, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        weight = torch.as_tensor(ctx.distillation.layer_weight, dtype=ctx.kind, device=ctx.device)
        return grads[0], weight, None


class DistilledHead(Head):
    """A head that also trains on a teacher's logits, and on its final hidden states.

    Args:
        arguments: of `Head`.
    """

    def __init__(self, *arguments: Any, distillation: Distillation) -> None:
        super().__init__(*arguments)
        self.distillation = distillation
        self._divergence: Divergence | CachedDivergence | None = None
        self._of_pairs: Tensor | float = 0.0
        spec, width = arguments[4], arguments[4].hidden_size
        finals = [number for number, pair in enumerate(distillation.spec.pairs) if pair.student is None]
        self.final_losses = nn.ModuleList(
            PairLoss(distillation, number, width, spec.init_std, self.tp, self.dtype) for number in finals
        )

    def _loss(self, hidden: Tensor, batch: Batch, info: PassInfo, depth: int) -> Tensor:
        """Return the scaled loss of a depth; add `kd_loss` and `kd_pair_0` ... to `info.sums` for the model's own."""
        loss = super()._loss(hidden, batch, info, depth)
        if depth or not info.is_training:
            return loss
        assert self._divergence is not None, "`_further_loss` has set it"
        info.sums["kd_loss"] = (self._divergence.losses * batch.loss_mask.t().flatten()).sum()
        of_pairs, self._of_pairs, self._divergence = self._of_pairs, 0.0, None
        return loss + of_pairs

    def _further_loss(
        self, normed: Tensor, x: Tensor, token_scale: Tensor, batch: Batch, info: PassInfo
    ) -> Any:
        """Return the divergence of the logits for training; scales the cross-entropy to its weight."""
        if not info.is_training:
            return super()._further_loss(batch, info)
        vocab = VocabShard(self.tp.group, self._output().weight.shape[0], self.vocab_size)
        if self.distillation.cached is not None:
            targets = self.distillation.cached.targets(batch, info)
            scale = token_scale * self.distillation.spec.kd_weight
            self._divergence = CachedDivergence(targets, vocab, scale)
            token_scale *= self.distillation.spec.lm_weight
            return self._divergence
        assert self.distillation.teacher is not None
        outputs, head = self.distillation.teacher.outputs(batch, info), self.distillation.teacher.head
        with torch.no_grad():
            rows = head.rows(outputs.normed, info)
        divergence = Divergence(self.distillation.spec, head, rows, vocab, token_scale.clone())
        of_pairs = [loss(normed, batch, info) for loss in self.final_losses]
        divergence.scale *= self._weigh(divergence, x, token_scale, batch, info)
        if of_pairs:
            self._of_pairs = sum(of_pairs[1:], of_pairs[0]) * self.distillation.layer_weight
        self._divergence = divergence
        return divergence

    def _weigh(
        self, divergence: Divergence, x: Tensor, token_scale: Tensor, batch: Batch, info: PassInfo
    ) -> Tensor | float:
        """Return the weight of the divergence, having scaled the cross-entropy and set that of the pairs."""
        spec = self.distillation.spec
        token_scale *= spec.lm_weight
        if not spec.needs_balance:
            self.distillation.layer_weight = spec.kd_weight * spec.layer_weight
            return spec.kd_weight
        lm, logits, pairs = self._mean_losses(divergence, x, batch, info).unbind()
        of_pairs = _ratio(logits, pairs) if spec.pairs else torch.zeros_like(logits)
        both = logits + of_pairs * pairs
        weight = _ratio(lm, both) if spec.lm_weight else torch.ones_like(lm)
        self.distillation.layer_weight = weight * of_pairs
        return weight

    @torch.no_grad()
    def _mean_losses(self, divergence: Divergence, x: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        """Return sums over the micro-batch: of cross-entropy, of divergence, and of the mean of the pairs, [3]."""
        output = self._output()
        mask = batch.loss_mask.t().flatten()
        labels = batch.labels.t().flatten().masked_fill(mask == 0, 0)
        lm = torch.empty_like(divergence.losses)
        for chunk in divergence.chunks(x):
            logits = self.scaling.logits(linear(x[chunk], output.weight, getattr(self, "bias", None)))
            divergence.compute(logits, chunk)
            lm[chunk] = vocab_parallel_cross_entropy(logits, labels[chunk], divergence.vocab).losses
        pairs = [info.sums[f"kd_pair_{number}"] for number in range(len(self.distillation.spec.pairs))]
        mean = torch.stack(pairs).mean().to(lm.dtype) if pairs else lm.new_zeros(())
        sums = torch.stack(((lm * mask).sum(), (divergence.losses * mask).sum(), mean))
        return all_reduce(sums, self.distillation.cp)


class Divergence:
    """The divergence of the tokens of a micro-batch from a teacher's, with the square of the temperature.

    Args:
        rows: the teacher's input of its output layer, [t, h].
        scale: factor of each token's divergence in the trained loss, [t].
    """

    def __init__(
        self, spec: DistillationSpec, head: TeacherHead, rows: Tensor, vocab: VocabShard, scale: Tensor
    ) -> None:
        self.spec, self.head, self.rows, self.vocab, self.scale = spec, head, rows, vocab, scale
        self.losses = torch.empty_like(scale)

    def begin(self, logits: Tensor, chunk: slice, factor: float) -> Callable[..., Tensor]:
        """Note the losses of a chunk; return `vocab_parallel_logits_gradient` with the divergence's, times a factor, added."""
        own = self.gradient(logits, chunk, factor)

        def with_divergence(known: TokenLosses, *arguments: Any, **named: Any) -> Tensor:
            return vocab_parallel_logits_gradient(known, *arguments, **named).add_(own)

        return with_divergence

    def gradient(self, logits: Tensor, chunk: slice, factor: float) -> Tensor:
        """Return the gradient with respect to a chunk's logits times a factor, [t, v/tp] in their dtype; note the chunk's losses."""
        spec, found = self.spec, []
        for part, rows in self._parts(chunk, logits):
            teacher, log_sums = self._compared(logits[part], rows)
            scale = self.scale[rows] * (spec.temperature * factor)
            losses = self.losses[rows] / spec.temperature**2
            found.append(
                divergence_gradient(
                    logits[part], teacher, log_sums, losses, scale, spec.temperature, self.vocab.num_real,
                    is_reversed=spec.is_reversed,
                )
            )  # fmt: skip
        return found[0] if len(found) == 1 else torch.cat(found)

    def compute(self, logits: Tensor, chunk: slice) -> None:
        """Note the losses of a chunk's tokens."""
        for part, rows in self._parts(chunk, logits):
            self._compared(logits[part], rows)

    def chunks(self, x: Tensor) -> Iterator[slice]:
        """Yield the rows of the student's x, [t, h], whose logits are computed together."""
        rows = chunk_rows(x.shape[0], self.vocab.rows, x.element_size())
        yield from (slice(start, min(start + rows, len(x))) for start in range(0, len(x), rows))

    def _parts(self, chunk: slice, logits: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield parts of a chunk: their rows in it, and among all. Fused kernels have no logits in the accumulation dtype: one part."""
        count = len(logits)
        size = max(1, _PART_BYTES // (self.vocab.rows * self.losses.element_size()))
        size = count if is_fused(logits) else size
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield slice(start, stop), slice(chunk.start + start, chunk.start + stop)

    def _compared(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Note the losses of some tokens; return the teacher's logits, [t, v/tp], and the log-sum-exps of both, [2, t]."""
        spec, vocab = self.spec, self.vocab
        teacher = self.head.chunk_logits(self.rows[rows])
        found = statistics(logits, teacher, spec.temperature, vocab.num_real, is_reversed=spec.is_reversed)
        largest = all_reduce(found[:2].clone(), vocab.group, "max")
        sums = all_reduce(rescaled(found, largest, is_reversed=spec.is_reversed), vocab.group)
        losses, log_sums = divergences(sums, largest, is_reversed=spec.is_reversed)
        self.losses[rows] = losses * spec.temperature**2
        return teacher, log_sums


class CachedDivergence:
    """KL(teacher || student) over the teacher's k most likely tokens and all others as one outcome.

    The gradient is that of the cross-entropy with other factors, plus k numbers a token: it costs no pass over the logits.

    Args:
        scale: factor of each token's divergence in the trained loss, [t].
    """

    def __init__(self, targets: TopTargets, vocab: VocabShard, scale: Tensor) -> None:
        self.targets, self.vocab, self.scale = targets, vocab, scale
        self.losses = torch.empty_like(scale)

    def begin(self, logits: Tensor, chunk: slice, factor: float) -> Callable[..., Tensor]:
        """Return `vocab_parallel_logits_gradient` with the divergence's, times a factor, added; note losses when it runs."""
        rows = slice(chunk.start, chunk.start + len(logits))
        local = self.targets.ids[rows] - self.vocab.first
        is_here = (local >= 0) & (local < self.vocab.rows)
        columns = local.clamp(0, self.vocab.rows - 1)
        top = logits.gather(1, columns).to(self.losses.dtype)
        scale = self.scale[rows] * factor

        def gradient(
            known: TokenLosses,
            token_scale: Tensor,
            vocab: VocabShard,
            dtype: torch.dtype,
            *,
            z_loss_coeff: float = 0.0,
        ) -> Tensor:
            of_top, of_rest = self._outcomes(top - known.log_sums[:, None], is_here, rows)
            token_softmax = token_scale * (1 + 2 * z_loss_coeff * known.log_sums)
            softmax_scale, stats = token_softmax + scale * (1 - of_rest), known.stats
            found = cross_entropy_backward(
                stats, known.log_sums, known.columns, softmax_scale, token_scale, vocab.num_real, dtype
            )
            return found.scatter_add_(
                1, columns, (of_top * scale[:, None]).masked_fill(~is_here, 0).to(dtype)
            )

        return gradient

    def _outcomes(self, log_top: Tensor, is_here: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Note the losses; return what each top token's gradient has besides (1 - rest) * p, [t, k], and rest = r_t / r_s, [t]."""
        targets = self.targets
        teacher = targets.log_probabilities[rows].to(log_top.dtype)
        log_rest = targets.log_rest[rows].to(log_top.dtype)
        p_top, p_teacher = log_top.exp().masked_fill(~is_here, 0), teacher.exp()
        differences = (p_teacher * (teacher - log_top)).masked_fill(~is_here, 0)
        sums = all_reduce(torch.stack((p_top.sum(1), differences.sum(1))), self.vocab.group)
        smallest = torch.finfo(log_top.dtype).eps
        of_student, of_teacher = (1 - sums[0]).clamp(min=smallest), log_rest.exp()
        of_rest = of_teacher * (log_rest.clamp(min=-100) - of_student.log())
        losses = sums[1] + torch.where(of_teacher > 0, of_rest, torch.zeros_like(of_rest))
        is_right = targets.is_right[rows]
        self.losses[rows] = torch.where(is_right, losses, torch.inf)
        ratio = torch.where(is_right, of_teacher / of_student, torch.inf)
        return p_top * ratio[:, None] - p_teacher, ratio


def _scale(batch: Batch, info: PassInfo, kind: torch.dtype) -> Tensor | float:
    """Return the factor that turns a sum over the tokens that count into its part of the trained loss."""
    scale = info.loss_scale.to(kind) if isinstance(info.loss_scale, Tensor) else info.loss_scale
    return batch.loss_denominator.clamp(min=1).to(kind).reciprocal() * scale


def _ratio(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Return the quotient of two sums of losses; 0 where the divisor is."""
    return torch.where(divisor > 0, dividend / divisor, torch.zeros_like(divisor))
