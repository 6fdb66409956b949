"""Kernels of others that attend and tell the log-sum-exp: torch's for CPUs, and FlashAttention and cuDNN for GPUs.

Each is a thin call. Those of GPUs compute in bf16 and fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.flash4 import determinism_options, flash4
from megatrain.kernels.attention.interface import AttentionKernel, CuSeqlens, MaskSpec
from megatrain.kernels.fused.launching import is_fake


def attention_kernel(backend: str, scale: float) -> AttentionKernel:
    """The kernel that `backend` names as `derived.attention_backend` does. torch's own choice is one of CPUs here.

    In plans of memory FlashAttention-2 stands for Transformer Engine's kernels.
    """
    if backend == "math":
        return EagerAttention(scale=scale)
    kernels: dict[str, Callable[[float], AttentionKernel]] = {
        "sdpa": CpuFlash,
        "flash4": Flash4,
        "flash2": Flash2,
        "cudnn": CuDnn,
        "transformer_engine": Flash2,
    }
    return kernels[backend](scale)


@dataclass(frozen=True)
class CpuFlash:
    """torch's kernel for CPUs, for fp64 to fp16."""

    scale: float

    @property
    def takes_masks(self) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(
            q,
            k,
            v,
            0.0,
            self._is_causal(q, k, view),
            attn_mask=_as_scores(view.mask, q.dtype),
            scale=self.scale,
        )
        if view.mask is not None:  # torch 2.13 gives 0 for queries that see no key
            lse = lse.masked_fill(~view.mask.any(-1), float("-inf"))
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.permute(1, 2, 0, 3) for x in (dout, q, k, v, out))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        mask, is_causal = _as_scores(view.mask, q.dtype), self._is_causal(q, k, view)
        found = op(dout, q, k, v, out, lse.permute(1, 2, 0), 0.0, is_causal, attn_mask=mask, scale=self.scale)
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in found)
        return dq, dk, dv

    @staticmethod
    def _is_causal(q: Tensor, k: Tensor, view: MaskSpec) -> bool:
        """The kernel lines the first query up with the first key."""
        is_causal = view.is_causal and view.mask is None
        assert not is_causal or q.shape[2] == k.shape[2], "a view that is not square has a mask"
        return is_causal


@dataclass(frozen=True)
class Flash2:
    """FlashAttention-2, as it comes with torch."""

    scale: float

    @property
    def takes_masks(self) -> bool:
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        b = q.shape[1]
        q, k, v = (_laid(x, view.borders) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._lengths(q, k, view), 0.0, view.is_causal, False, **self._how(view)
        )
        return _unlaid(out, b), _unlaid_lse(lse, b)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        b = q.shape[1]
        dout, q, k, v, out = (_laid(x, view.borders) for x in (dout, q, k, v, out))
        # Of dropout, which is none.
        state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
        found = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, _laid_lse(lse, view.borders), *self._lengths(q, k, view), 0.0, view.is_causal,
            state, unused, **self._how(view),
        )  # fmt: skip
        dq, dk, dv = (_unlaid(x, b) for x in found)
        return dq, dk, dv

    @staticmethod
    def _lengths(q: Tensor, k: Tensor, view: MaskSpec) -> tuple[Tensor | None, Tensor | None, int, int]:
        return view.borders or (None, None, q.shape[1], k.shape[1])

    def _how(self, view: MaskSpec) -> dict[str, Any]:
        window = {} if view.window is None else {"window_size_left": view.window, "window_size_right": 0}
        return {"scale": self.scale, **window}


@dataclass(frozen=True)
class CuDnn:
    """cuDNN's kernel, for square causal blocks and for those that are seen whole."""

    scale: float

    @property
    def takes_masks(self) -> bool:
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == k.shape[0] or not view.is_causal, "a causal block that is not square"
        assert view.window is None, "no windows"
        assert view.borders is None, "no documents"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, view.is_causal, False, scale=self.scale)
        return out.permute(2, 0, 1, 3), lse.squeeze(-1).permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.permute(1, 2, 0, 3) for x in (dout, q, k, v, out))
        no_dropout = q.new_zeros((), dtype=torch.int64)
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.permute(1, 2, 0).unsqueeze(-1).contiguous(), no_dropout, no_dropout, None, None, None,
            q.shape[2], k.shape[2], 0.0, view.is_causal, scale=self.scale,
        )  # fmt: skip
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in found)
        return dq, dk, dv


@dataclass(frozen=True)
class Flash4:
    """flash-attn-4, which writes where the next operation reads. Where there are as many queries as keys, their gradients are
    parts of one tensor, [s, b, n + 2 g, d].
    """

    scale: float

    @property
    def takes_masks(self) -> bool:
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, view: MaskSpec) -> tuple[Tensor, Tensor]:
        s, b, n, _ = q.shape
        out = _room(q, view.borders, n)
        rows = (b, n, s) if view.borders is None else (n, b * s)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        if not is_fake(q):
            q, k, v = (_laid(x, view.borders) for x in (q, k, v))
            flash4().forward(q, k, v, out=out, lse=lse, **self._how(view))
        return _unlaid(out, b), _unlaid_lse(lse, b)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, view: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_fake(q):  # stands in for what this kernel takes while it works
            Flash2(self.scale).backward(dout, q, k, v, out, lse, view)
        borders, b, n, g = view.borders, q.shape[1], q.shape[2], k.shape[2]
        if q.shape[0] == k.shape[0]:
            dq, dk, dv = _room(q, borders, n + 2 * g).split((n, g, g), dim=-2)
        else:
            dq, dk, dv = _room(q, borders, n), _room(k, borders, g), _room(k, borders, g)
        if not is_fake(q):
            q, k, v, out, dout = (_laid(x, borders) for x in (q, k, v, out, dout))
            lse, how = _laid_lse(lse, borders), self._how(view) | determinism_options()
            flash4().backward(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, **how)
        dq, dk, dv = (_unlaid(x, b) for x in (dq, dk, dv))
        return dq, dk, dv

    def _how(self, view: MaskSpec) -> dict[str, Any]:
        how: dict[str, Any] = {"softmax_scale": self.scale, "causal": view.is_causal}
        if view.window is not None:
            how |= {"window_size_left": view.window, "window_size_right": 0}
        if view.borders is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            how |= dict(zip(names, view.borders, strict=True))
        return how


def _as_scores(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores: 0 or -inf."""
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _room(like: Tensor, borders: CuSeqlens | None, heads: int) -> Tensor:
    """Memory for [s, b, heads, d], in the form that `_laid` gives."""
    s, b, _, d = like.shape
    if borders is not None:
        return like.new_empty(b * s, heads, d)
    return like.new_empty(s, b, heads, d).transpose(0, 1)


def _laid(x: Tensor, borders: CuSeqlens | None) -> Tensor:
    """[s, b, n, d] -> [b, s, n, d], or samples end to end, [b * s, n, d]."""
    x = x.transpose(0, 1)
    return x if borders is None else x.flatten(0, 1)


def _unlaid(x: Tensor, b: int) -> Tensor:
    """What `_laid` undoes."""
    return (x if x.dim() == 4 else x.unflatten(0, (b, -1))).transpose(0, 1)


def _laid_lse(lse: Tensor, borders: CuSeqlens | None) -> Tensor:
    """[s, b, n] -> [b, n, s], or samples end to end, [n, b * s]."""
    return (lse.permute(1, 2, 0) if borders is None else lse.permute(2, 1, 0).flatten(1)).contiguous()


def _unlaid_lse(lse: Tensor, b: int) -> Tensor:
    """What `_laid_lse` undoes."""
    return lse.permute(2, 0, 1) if lse.dim() == 3 else lse.unflatten(1, (b, -1)).permute(2, 1, 0)
