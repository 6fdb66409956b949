"""How much memory a rank of each pipeline stage needs, by class, from the plan alone.

weights, gradients, main weights, optimizer state   as `Engine` makes them, on a device without memory
loss                                                 one chunk of logits
activations                                          micro-batches in flight * what one keeps, by the formulas below

Temporaries of single operations, buffers of collectives, the allocator's losses and the CUDA context (about 1 GB)
come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.config import Plan
from megatrain.kernels.elementwise import wide
from megatrain.model.head import chunk_rows
from megatrain.model.recompute import Recompute
from megatrain.model.specs import AttentionSpec, GptSpec, LayerSpec, MlpSpec
from megatrain.parallel.grid import RankGrid
from megatrain.training.engine import Engine, recompute_of


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a rank holds for the whole run."""

    weights: int
    gradients: int
    main_weights: int
    """0 where they are the weights themselves."""
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.main_weights + self.optimizer_state


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage, at the peak of a step."""

    held: Held
    loss: int
    """Logits and what the loss makes of them, of one chunk."""
    microbatches_in_flight: int
    """At most, between forward and backward."""
    activations_per_microbatch: int
    activations_computed_again: int
    """Of the part that is computed again before its backward pass, for one micro-batch."""

    @property
    def activations(self) -> int:
        return self.microbatches_in_flight * self.activations_per_microbatch + self.activations_computed_again

    @property
    def total(self) -> int:
        return self.held.total + self.loss + self.activations


def held_by(engine: Engine) -> Held:
    """What an engine has made, which may be on the meta device."""
    buffers, optimizer = engine.buffers, engine.optimizer
    is_own_memory = optimizer.main[0].dtype != buffers.weights[0].dtype
    return Held(
        weights=sum(t.nbytes for t in buffers.weights),
        gradients=sum(t.nbytes for t in buffers.gradients),
        main_weights=sum(t.nbytes for t in optimizer.main) if is_own_memory else 0,
        optimizer_state=sum(t.nbytes for kind in optimizer.rule.kinds for t in optimizer.state(kind)),
    )


def stage_memory(plan: Plan, engine: Engine, *, microbatches_in_flight: int) -> StageMemory:
    """Memory of the ranks of a stage, of which `engine` is one."""
    kept = Kept.of(plan, engine.model.spec, engine.grid)
    stage = kept.stage(engine.grid, recompute_of(plan))
    return StageMemory(
        held=held_by(engine),
        loss=kept.logits() if engine.grid.pp.is_last else 0,
        microbatches_in_flight=microbatches_in_flight,
        activations_per_microbatch=stage.kept,
        activations_computed_again=stage.computed_again,
    )


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one micro-batch on one stage."""

    kept: int
    computed_again: int


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the `local` implementation keeps of a micro-batch for the backward pass, in bytes.

    t   tokens, s * b                    r   tokens between layers, t / tp with sequence parallelism, else t
    h   hidden size                      f   width of the MLP, m matrices into it (2 if gated, else 1)
    q   heads * channels                 k   query groups * channels; both, as f and n heads, of this tensor rank
    w   bytes of the model's dtype       W   of sums, at least 4          H   of the residual stream

    between layers        r h H           one more than there are segments with layers that have parts
    norm                  r W (RMSNorm), 2 r W (LayerNorm)   its input is kept anyway, or counted where it is made
    norm + qkv            r h w (the normed input; not without a first norm, where H = w) + t (q + 2 k) w
    queries and keys      t (q + k) w      where they are turned or normed, + t 2 n W or so for the norms
    fused attention       t q w + 4 t n    output and logarithms; with windows or documents copies instead of views
    attention written out n b s s * (...)  see `_written_out`
    residual in between   r h H            input of the second norm
    norm + fc1            r h w + t m f w
    activation + fc2      t f w
    end of a branch       r h w and a norm's numbers with a norm, r h for dropout's mask
    head                  r W + t h w      the gradient of the hidden states is there after the forward pass

    Recomputation of whole layers leaves what is between the segments; of `core_attn` it leaves queries, keys and
    values; of `mlp` it leaves what attention adds, r h w.
    """

    spec: GptSpec
    tokens: int
    rows: int
    seq_length: int
    tp: int
    width: int
    wide: int
    hidden: int
    runs_by_lengths: bool
    """Whether attention with windows or documents runs by lengths, which needs no mask: on a GPU in 16 bits."""
    has_documents: bool

    @classmethod
    def of(cls, plan: Plan, spec: GptSpec, grid: RankGrid) -> Kept:
        """Of the micro-batches of a plan."""
        config, dtype = plan.config, getattr(torch, plan.derived.params_dtype)
        seq_length, micro = config.data.seq_length, config.training.micro_batch_size
        tokens, tp = seq_length * micro, grid.tp.size
        by_lengths = plan.derived.device == "cuda" and dtype in (torch.bfloat16, torch.float16)
        wide_bytes = wide(dtype).itemsize
        return cls(
            spec=spec,
            tokens=tokens,
            rows=tokens // tp if config.parallel.sequence_parallel else tokens,
            seq_length=seq_length,
            tp=tp,
            width=dtype.itemsize,
            wide=wide_bytes,
            hidden=wide_bytes if spec.is_residual_wide else dtype.itemsize,
            runs_by_lengths=by_lengths,
            has_documents=config.data.reset_attention_mask or config.data.dataloader_inter_document_masking,
        )

    def stage(self, grid: RankGrid, recompute: Recompute) -> StageActivations:
        """What a stage keeps of a micro-batch, and what it has of it for a while where it computes again."""
        per_stage = len(self.spec.layers) // grid.pp.size
        layers = self.spec.layers[grid.pp.rank * per_stage : (grid.pp.rank + 1) * per_stage]
        border = self.rows * self.spec.hidden_size * self.hidden
        ends = (self._embedding() if grid.pp.is_first else 0) + (self._head() if grid.pp.is_last else 0)
        whole = [self.layer(layer) for layer in layers]
        if recompute.kind == "uniform":
            n = recompute.num_layers
            chunks = [whole[first : first + n] for first in range(0, per_stage, n)]
            again = max(sum(chunk) + (len(chunk) - 1) * border for chunk in chunks)
            return StageActivations(ends + (1 + sum(map(any, chunks))) * border, again)
        borders = (1 + sum(map(bool, whole))) * border  # a layer without parts hands on what it gets
        if recompute.kind == "block":
            n = recompute.num_layers
            return StageActivations(ends + borders + sum(whole[n:]), max(whole[:n]))
        if recompute.kind == "parts":
            kept = [self.layer(layer, recompute.parts) for layer in layers]
            again = max(0, *(full - less for full, less in zip(whole, kept, strict=True)))
            return StageActivations(ends + borders + sum(kept), again)
        return StageActivations(ends + borders + sum(whole), 0)

    def layer(self, layer: LayerSpec, parts: tuple[str, ...] = ()) -> int:
        """Of one layer, of which `parts` are computed again, without what enters and leaves it."""
        attention = 0
        if layer.mixer is not None:
            attention = self._entry(is_residual_kept=True) + self._branch_end()
            attention += self._attention(layer.mixer, "core_attn" in parts)
        return attention + (0 if layer.mlp is None else self._mlp(layer, layer.mlp, "mlp" in parts))

    def logits(self) -> int:
        """One chunk: logits, wide logits where they are other, what is left of the largest, and the cap's slope."""
        columns = self.spec.padded_vocab_size // self.tp
        bytes_each = self.width + self.wide + (self.wide if self.wide > self.width else 0)
        bytes_each += self.width if self.spec.logit_softcap is not None else 0
        return min(self.tokens, chunk_rows(columns)) * columns * bytes_each

    def _mlp(self, layer: LayerSpec, mlp: MlpSpec, is_computed_again: bool) -> int:
        """The second branch, or the only one; what enters that is counted as what is between layers."""
        stream, is_second = self.rows * self.spec.hidden_size, layer.mixer is not None
        if is_computed_again:
            return stream * self.width if is_second else 0
        matrices = 2 if mlp.is_gated else 1
        inner = self.tokens * mlp.ffn_hidden_size // self.tp * self.width
        has_norm = self.spec.norm_position != "post"
        return (
            (stream * self.hidden if has_norm and is_second else 0)
            + self._entry(is_residual_kept=has_norm or not is_second)
            + (matrices + 1) * inner
            + self._branch_end()
        )

    def _entry(self, *, is_residual_kept: bool) -> int:
        """What the first linear layer of a branch keeps of its input."""
        stream = self.rows * self.spec.hidden_size
        if self.spec.norm_position != "post":
            return self._norm(self.rows) + stream * self.width
        is_same_tensor = is_residual_kept and self.hidden == self.width
        return 0 if is_same_tensor else stream * self.width

    def _norm(self, vectors: int) -> int:
        return vectors * self.wide * (2 if self.spec.norm.kind == "LayerNorm" else 1)

    def _branch_end(self) -> int:
        stream = self.rows * self.spec.hidden_size
        norm = 0 if self.spec.norm_position == "pre" else stream * self.width + self._norm(self.rows)
        return norm + (stream if self.spec.hidden_dropout else 0)

    def _attention(self, spec: AttentionSpec, is_computed_again: bool) -> int:
        t, w = self.tokens, self.width
        heads, groups = spec.num_heads // self.tp, max(1, spec.num_query_groups // self.tp)
        q, k = t * heads * spec.head_channels * w, t * groups * spec.head_channels * w
        numbers = {
            "none": 0,
            "head": self._norm(t * (heads + groups)),
            "all_heads": 2 * t * self.wide,
        }[spec.qk_norm]
        has_own_tensors = spec.rotary is not None or spec.qk_norm != "none"
        inputs = q + 2 * k + (q + k if has_own_tensors else 0)
        is_fused = spec.softcap is None and spec.sink == "none" and not spec.dropout
        if is_computed_again:
            return numbers + inputs + q
        if not is_fused:
            normed_inputs = q + 2 * k if spec.qk_norm != "none" else 0
            return numbers + normed_inputs + self._written_out(spec) + q
        has_mask = self.has_documents or spec.window is not None
        if has_mask and self.runs_by_lengths and t > self.seq_length:
            inputs = q + 2 * k + (q + 2 * k if spec.qk_norm != "none" else 0)
        mask = 0
        if has_mask and not self.runs_by_lengths:
            mask = self.seq_length**2 * (t // self.seq_length if self.has_documents else 1)
        return numbers + inputs + q + t * heads * 4 + mask

    def _written_out(self, spec: AttentionSpec) -> int:
        """Scaled queries and keys, wide, and values, for each head; then scores.

        softcap     W   the tangent
        softmax     W   and a column more with a sink
        dropout     1 + w, else w where w is not W
        """
        t = self.tokens
        heads = spec.num_heads // self.tp
        q = t * heads * spec.head_channels
        scores = t * heads * self.seq_length
        each = self.wide
        if spec.softcap is not None:
            each += self.wide
        if spec.dropout:
            each += 1 + self.width
        elif self.width != self.wide:
            each += self.width
        column = t * heads * self.wide if spec.sink != "none" else 0
        mask = self.seq_length**2 * (t // self.seq_length if self.has_documents else 1)
        return q * (2 * self.wide + self.width) + scores * each + column + mask

    def _embedding(self) -> int:
        """Ids and a mark, for each token; as much for learned positions; dropout's mask."""
        positions = self.rows * 9 if self.spec.num_positions is not None else 0
        mask = self.rows * self.spec.hidden_size if self.spec.hidden_dropout else 0
        return self.tokens * 9 + positions + mask

    def _head(self) -> int:
        return self._norm(self.rows) + self.tokens * self.spec.hidden_size * self.width
