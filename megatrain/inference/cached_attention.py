"""Modules that replace core attention in a model that generates text: they read and extend a cache.

    CachedAttention         keys and values after RoPE; normal heads, grouped queries, windows, softcaps, sinks
    CachedLatentAttention   normalized latents and rotated keys, one row for all heads
    CachedSparseAttention   the same, and the keys of the indexer, which selects the rows that a query attends to
    CachedDeltaRule         state of the gated delta rule, and the last inputs of its convolution
    CachedMamba             the same of Mamba-2

Passes that add one token to each sequence have a kernel of their own (kernels/attention/decode.py), unless layers have latents or
states. In others the new tokens of all sequences are one packed row, [t, 1, ...]. Kernels with cumulative lengths compute all sequences in
one call: rows between two sequences are a document without queries, so that nothing is copied. Other kernels, those with
softcaps too, compute them one by one.

The up-projection of a latent is linear, so that scores and outputs follow from latents, with projected queries and outputs:
q . (W_k c) = (W_k^T q) . c, and sum p (W_v c) = W_v (sum p c). All heads attend to one head of rows (multi-query attention).

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 (absorbed projections).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.inference.cache import Extent, Space, SpaceStep
from megatrain.kernels.attention.backends import TritonAttention, attention_kernel
from megatrain.kernels.attention.decode import decode_attention, write_rows
from megatrain.kernels.attention.interface import AttentionKernel, CuSeqlens, MaskSpec, SoftmaxMerge
from megatrain.model.families.sparse_attention import IndexedAttention, selected_keys
from megatrain.model.implementations.attention import LocalContextAttention
from megatrain.model.implementations.local import LocalColumnLinear
from megatrain.model.latent_attention import Latents, UpProjection
from megatrain.model.linear_attention import DeltaRule
from megatrain.model.mamba import MambaScan
from megatrain.parallel.batch import PassInfo

_MAX_FUSED_CHANNELS = 256


@dataclass(kw_only=True)
class CachedPass(PassInfo):
    """The context of a pass that extends sequences."""

    spaces: Mapping[Space, SpaceStep]
    lengths: tuple[int, ...]
    """New tokens of each sequence."""
    states: tuple[int, ...]
    """Number of the states of each sequence."""
    memory_lengths: list[int] = field(default_factory=list)
    """Tokens that the encoder computes in this pass, of each sequence that begins."""
    shared: dict[Space, Packing] = field(default_factory=dict)
    """Packed documents of the spaces that layers have used in this pass."""

    def packing(self, space: Space) -> Packing:
        """Return the documents of a space for kernels with cumulative lengths."""
        if space not in self.shared:
            step = self.spaces[space]
            self.shared[space] = pack(step.extents, step.written.device)
        return self.shared[space]


@dataclass(frozen=True)
class DecodeRows:
    """Rows of one space in a pass that adds one token to each sequence, all int64 [b] on the device."""

    first: Tensor
    count: Tensor
    """Rows of each sequence, with the row of the new token."""
    written: Tensor
    """Row of the new token."""


@dataclass(kw_only=True)
class DecodePass(PassInfo):
    """The context of a pass that adds one token to each sequence; the host knows neither tokens nor lengths."""

    rows: Mapping[Space, DecodeRows]


@dataclass(frozen=True)
class Packing:
    """Documents of a pass in the order of their rows, with those between sequences, which have no queries."""

    order: Tensor | None
    """Order of the tokens, int64 [t]; None: as they are."""
    back: Tensor | None
    """Order that undoes it."""
    num_rows: int
    """Rows up to the last document's end."""
    cu_seqlens: CuSeqlens


def pack(extents: tuple[Extent, ...], device: torch.device) -> Packing:
    """Return the documents of these extents."""
    queries, rows = [0], [0]
    ordered = sorted(extents, key=lambda extent: extent.first_row)
    for extent in ordered:
        if extent.first_row > rows[-1]:
            rows.append(extent.first_row)
            queries.append(queries[-1])
        rows.append(extent.first_row + extent.num_rows)
        queries.append(queries[-1] + extent.num_tokens)
    order = back = None
    if ordered != list(extents):
        tokens = (range(one.first_token, one.first_token + one.num_tokens) for one in ordered)
        order = torch.tensor(list(itertools.chain(*tokens)), device=device)
        back = order.argsort()
    lengths = CuSeqlens(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        # FlashAttention-2 takes another path for one query per document, which allows no document without queries.
        max(2, *(extent.num_tokens for extent in extents)),
        rows[-1],
    )
    return Packing(order, back, rows[-1], lengths)


class RowAttention(nn.Module):
    """Attention of new tokens to the rows of their sequences in one layer's cache.

    Args:
        spec: attention of the layer.
        kernel: kernel that returns the log-sum-exp.
        rows: tensors of rows, [rows, heads, channels].
    """

    def __init__(self, spec: AttentionSpec, kernel: AttentionKernel, rows: list[Tensor]) -> None:
        super().__init__()
        self.window, self.kernel, self.rows = spec.window, kernel, rows

    def write(self, info: CachedPass, new: tuple[Tensor, ...]) -> None:
        """Write the rows of new tokens, [t, 1, heads, channels] each."""
        step = info.spaces[self.window]
        for rows, values in zip(self.rows, new, strict=True):
            rows.index_copy_(0, step.written, values.squeeze(1).to(rows.dtype))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, info: CachedPass) -> Tensor:
        """Attend from q [t, 1, n, d] to rows k and v, [rows, g, d]; sink logits [n]. Return [t, 1, n, value channels]."""
        if self.kernel.needs_explicit_mask or isinstance(self.kernel, TritonAttention):
            extents = info.spaces[self.window].extents
            return torch.cat([self._attend_one(q, k, v, sink, extent) for extent in extents])
        packing = info.packing(self.window)
        q = q if packing.order is None else q[packing.order]
        mask = MaskSpec(is_causal=True, window=self.window, cu_seqlens=packing.cu_seqlens)
        k, v = (x[: packing.num_rows, None] for x in (k, v))
        out = _with_sink(*self.kernel.forward(q, k, v, mask), sink)
        return (out if packing.back is None else out[packing.back]).to(q.dtype)

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, extent: Extent) -> Tensor:
        count, stop = extent.num_tokens, extent.first_row + extent.num_rows
        seen = extent.num_rows if self.window is None else min(extent.num_rows, self.window + count)
        q = q[extent.first_token : extent.first_token + count]
        k, v = (x[stop - seen : stop, None] for x in (k, v))
        if not self.kernel.needs_explicit_mask:
            mask = MaskSpec(is_causal=True, window=self.window)
        elif count == 1:
            mask = MaskSpec()
        else:
            seen_keys = torch.ones(1, 1, count, seen, dtype=torch.bool, device=q.device).tril(seen - count)
            mask = MaskSpec(
                explicit=seen_keys if self.window is None else seen_keys.triu(seen - count - self.window)
            )
        return _with_sink(*self.kernel.forward(q, k, v, mask), sink).to(q.dtype)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return out
    merge = SoftmaxMerge(out, lse)
    merge.add_sink(sink)
    return merge.out


class CachedAttention(RowAttention):
    """Core attention of a layer; `core` has its sink logits."""

    def __init__(self, spec: AttentionSpec, core: nn.Module, rows: list[Tensor]) -> None:
        super().__init__(spec, _kernel(spec, rows[0]), rows)
        self.core, self.scale, self.softcap = core, spec.score_scale, spec.softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: CachedPass | DecodePass) -> Tensor:
        """Map q [t, 1, n, d], k and v [t, 1, g, d] -> [t, 1, n * d]."""
        sink = self.core.sink_logits(q) if isinstance(self.core, LocalContextAttention) else None
        keys, values = self.rows
        if isinstance(info, DecodePass):
            rows, q = info.rows[self.window], q.squeeze(1)
            write_rows(keys, values, k.squeeze(1), v.squeeze(1), rows.written)
            out = decode_attention(
                q, keys, values, rows.first, rows.count,
                scale=self.scale, softcap=self.softcap, window=self.window, sink=sink,
            )  # fmt: skip
            return out.flatten(1).unsqueeze(1)
        self.write(info, (k, v))
        return self.attend(q, keys, values, sink, info).flatten(2)


class CachedLatentAttention(RowAttention):
    """Up-projections and core attention of a layer with latents."""

    def __init__(self, spec: AttentionSpec, up: UpProjection, core: nn.Module, rows: list[Tensor]) -> None:
        super().__init__(spec, attention_kernel("math", spec.score_scale, spec.softcap), rows)
        assert spec.latent is not None
        self.up, self.core, self.sizes = up, core, spec.latent

    def forward(self, queries: Tensor, keys_values: Tensor, rotary_keys: Tensor, info: CachedPass) -> Tensor:
        """Map the latents of new tokens, [t, 1, channels], -> [t, 1, n * value channels]."""
        self.write(info, (self.new_rows(keys_values, rotary_keys, info),))
        q = self.absorbed_queries(queries, info)
        sink = self.core.sink_logits(q) if isinstance(self.core, LocalContextAttention) else None
        (rows,) = self.rows
        return self.values(self.attend(q, rows, rows[..., : self.sizes.kv_rank], sink, info))

    def new_rows(self, keys_values: Tensor, rotary_keys: Tensor, info: CachedPass) -> Tensor:
        """Return the rows of new tokens, [t, 1, 1, channels]."""
        latents = self._linear.norm.add_and_norm(keys_values, None)[1].unsqueeze(2)
        return torch.cat((latents, self.up.rotate(rotary_keys, info)), dim=-1)

    def absorbed_queries(self, queries: Tensor, info: CachedPass) -> Tensor:
        """Return queries of rows, [t, 1, n, channels]."""
        sizes = self.sizes
        q, rotated_q = self.up.project_queries(queries, info).split(
            [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1
        )
        return torch.cat((torch.einsum("tbnc,ncr->tbnr", q, self._weights[0]), rotated_q), dim=-1)

    def values(self, out: Tensor) -> Tensor:
        """Map weighted means of latents, [t, 1, n, channels], -> [t, 1, n * value channels]."""
        return torch.einsum("tbnr,nvr->tbnv", out, self._weights[1]).flatten(2)

    @property
    def _linear(self) -> LocalColumnLinear:
        assert isinstance(self.up.keys_values, LocalColumnLinear)
        return self.up.keys_values

    @property
    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights of keys and of values, [n, channels, latent channels]."""
        sizes = self.sizes
        to_keys, to_values = self._linear.weight.view(self.up.local_heads, -1, sizes.kv_rank).split(
            [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1
        )
        return to_keys, to_values


class CachedSparseAttention(CachedLatentAttention):
    """Up-projections, indexer and core attention of a layer with latents; every score is computed, as in training."""

    def __init__(self, spec: AttentionSpec, whole: IndexedAttention, rows: list[Tensor]) -> None:
        super().__init__(spec, whole.up, whole.core, rows)
        self.indexer = whole.indexer

    def forward(self, latents: Latents, x: Tensor, info: CachedPass) -> tuple[Tensor, None]:  # type: ignore[override]
        """Map latents and the norm of the hidden states, [t, 1, channels], -> [t, 1, n * value channels]."""
        index_q, index_k, weights = self.indexer.projected(x, latents.queries, info)
        new = self.new_rows(latents.keys_values, latents.rotary_keys, info), index_k.unsqueeze(2)
        self.write(info, new)
        q, found = self.absorbed_queries(latents.queries, info), []
        for extent in info.spaces[self.window].extents:
            tokens = slice(extent.first_token, extent.first_token + extent.num_tokens)
            rows, keys = (one[extent.first_row : extent.first_row + extent.num_rows] for one in self.rows)
            selected = selected_keys(index_q[tokens], keys, weights[tokens], self.indexer.spec)
            mask = MaskSpec(explicit=selected.unsqueeze(1))
            k = rows.unsqueeze(1)
            found.append(self.kernel.forward(q[tokens], k, k[..., : self.sizes.kv_rank], mask)[0])
        return self.values(torch.cat(found).to(q.dtype)), None


class CachedStates(nn.Module):
    """Convolution and recurrence of a layer with states.

    Args:
        convolved: last inputs of the convolution, [sequences, kernel size - 1, channels].
        memory: states, [sequences, n, ...].
    """

    def __init__(self, core: nn.Module, convolved: Tensor, memory: Tensor) -> None:
        super().__init__()
        self.core, self.convolved, self.memory = core, convolved, memory

    def forward(self, *arguments: object) -> Tensor:
        """Map the projections of new tokens, [t, 1, channels], -> [t, 1, ...]; `begin_pass` comes first."""
        projections = [one for one in arguments if isinstance(one, Tensor)]
        out = None
        for tokens, states in self._groups:
            part = self.continued([x[tokens, 0] for x in projections], states)
            out = part.new_empty(len(projections[0]), 1, *part.shape[2:]) if out is None else out
            out[tokens, 0] = part
        assert out is not None
        return out

    def begin_pass(self, info: CachedPass) -> None:
        """Group the sequences by their number of new tokens: the sequences of a group are computed together."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        firsts = itertools.accumulate(info.lengths[:-1], initial=0)
        for first, length, state in zip(firsts, info.lengths, info.states, strict=True):
            groups[length].append((first, state))
        device = self.memory.device
        self._groups = [
            (
                torch.tensor([first for first, _ in found], device=device)
                + torch.arange(length, device=device)[:, None],
                torch.tensor([state for _, state in found], device=device),
            )
            for length, found in groups.items()
        ]

    def continued(self, projections: Sequence[Tensor], states: Tensor) -> Tensor:
        """Compute sequences [s, b, channels] with as many new tokens, and keep their states."""
        raise NotImplementedError

    def inputs(self, new: Tensor, states: Tensor) -> Tensor:
        """Return the inputs of the convolution, those before the new ones first, and keep the last ones."""
        inputs = torch.cat((self.convolved[states].transpose(0, 1).to(new.dtype), new))
        kept = inputs[len(inputs) - self.convolved.shape[1] :]
        self.convolved[states] = kept.transpose(0, 1).to(self.convolved.dtype)
        return inputs


class CachedDeltaRule(CachedStates):
    """Convolution and gated delta rule of a layer; states [sequences, n, dk, dv]."""

    def continued(self, projections: Sequence[Tensor], states: Tensor) -> Tensor:
        qkv, strengths = projections
        assert isinstance(self.core, DeltaRule)
        out, self.memory[states] = self.core.continued(
            self.inputs(qkv, states), strengths, self.memory[states]
        )
        return out


class CachedMamba(CachedStates):
    """Convolution, scan and norm of Mamba-2; states [sequences, n, p, m]."""

    def continued(self, projections: Sequence[Tensor], states: Tensor) -> Tensor:
        z, mixed, dt = projections
        assert isinstance(self.core, MambaScan)
        convolved = self.core.convolved(self.inputs(mixed, states))[-len(mixed) :]
        y, self.memory[states] = self.core.scan(convolved, dt, state=self.memory[states])
        return self.core.normed(y, z)


def _kernel(spec: AttentionSpec, rows: Tensor) -> AttentionKernel:
    """Return the kernel for rows of this device and dtype."""
    has_size = spec.head_dim <= _MAX_FUSED_CHANNELS and spec.head_dim % 8 == 0
    if rows.device.type == "cuda" and has_size and rows.dtype.itemsize == 2:
        backend = "flash2" if spec.softcap is None else "triton"
    else:
        is_cpu = rows.device.type == "cpu"
        backend = "sdpa" if is_cpu and spec.softcap is None else "math"
    return attention_kernel(backend, spec.score_scale, spec.softcap)
