"""Attention kernels that return the log-sum-exp: torch's for CPUs; FlashAttention, cuDNN and our own for GPUs.

Each is a thin wrapper. The GPU kernels compute in bf16 and fp16.
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
from megatrain.kernels.fused import attention as fused
from megatrain.kernels.fused.launching import is_fake


def attention_kernel(backend: str, scale: float, softcap: float | None = None) -> AttentionKernel:
    """Return the kernel for a value of `derived.attention_backend`; "sdpa" is the CPU kernel here.

    Memory plans use FlashAttention-2 in place of Transformer Engine's kernels. Only "math" and "triton" support softcaps and
    dropout.
    """
    if backend == "math":
        return EagerAttention(scale=scale, softcap=softcap)
    if backend == "triton":
        return TritonAttention(scale, softcap)
    assert softcap is None, f"{backend} has no softcaps"
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
    """torch's flash attention for CPUs, in fp64 to fp16."""

    scale: float

    needs_explicit_mask = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(
            q,
            k,
            v,
            0.0,
            self._is_causal(q, k, mask),
            attn_mask=_as_bias(mask.explicit, q.dtype),
            scale=self.scale,
        )
        if mask.explicit is not None:  # torch 2.13 returns 0 for queries without keys
            lse = lse.masked_fill(~mask.explicit.any(-1), float("-inf"))
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.permute(1, 2, 0, 3) for x in (dout, q, k, v, out))
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        bias, is_causal = _as_bias(mask.explicit, q.dtype), self._is_causal(q, k, mask)
        grads = op(dout, q, k, v, out, lse.permute(1, 2, 0), 0.0, is_causal, attn_mask=bias, scale=self.scale)
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
        return dq, dk, dv

    @staticmethod
    def _is_causal(q: Tensor, k: Tensor, mask: MaskSpec) -> bool:
        """Return the kernel's causal flag; the kernel aligns the first query with the first key."""
        is_causal = mask.is_causal and mask.explicit is None
        assert not is_causal or q.shape[2] == k.shape[2], "a block that is not square has an explicit mask"
        return is_causal


@dataclass(frozen=True)
class Flash2:
    """FlashAttention-2 as bundled with torch."""

    scale: float

    needs_explicit_mask = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        b = q.shape[1]
        q, k, v = (_to_kernel_layout(x, mask.cu_seqlens) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._lengths(q, k, mask), 0.0, mask.is_causal, False, **self._options(mask)
        )
        return _from_kernel_layout(out, b), _lse_from_kernel_layout(lse, b)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        b = q.shape[1]
        dout, q, k, v, out = (_to_kernel_layout(x, mask.cu_seqlens) for x in (dout, q, k, v, out))
        rng_state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # no dropout
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, _lse_to_kernel_layout(lse, mask.cu_seqlens), *self._lengths(q, k, mask), 0.0, mask.is_causal,
            rng_state, unused, **self._options(mask),
        )  # fmt: skip
        dq, dk, dv = (_from_kernel_layout(x, b) for x in grads)
        return dq, dk, dv

    @staticmethod
    def _lengths(q: Tensor, k: Tensor, mask: MaskSpec) -> tuple[Tensor | None, Tensor | None, int, int]:
        return mask.cu_seqlens or (None, None, q.shape[1], k.shape[1])

    def _options(self, mask: MaskSpec) -> dict[str, Any]:
        window = {} if mask.window is None else {"window_size_left": mask.window, "window_size_right": 0}
        return {"scale": self.scale, **window}


@dataclass(frozen=True)
class CuDnn:
    """cuDNN's kernel, for square causal blocks and blocks without a mask."""

    scale: float

    needs_explicit_mask = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == k.shape[0] or not mask.is_causal, "a causal block that is not square"
        assert mask.window is None, "no windows"
        assert mask.cu_seqlens is None, "no documents"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, mask.is_causal, False, scale=self.scale)
        return out.permute(2, 0, 1, 3), lse.squeeze(-1).permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.permute(1, 2, 0, 3) for x in (dout, q, k, v, out))
        no_dropout = q.new_zeros((), dtype=torch.int64)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.permute(1, 2, 0).unsqueeze(-1).contiguous(), no_dropout, no_dropout, None, None, None,
            q.shape[2], k.shape[2], 0.0, mask.is_causal, scale=self.scale,
        )  # fmt: skip
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in grads)
        return dq, dk, dv


@dataclass(frozen=True)
class Flash4:
    """flash-attn-4, which writes its results in the layout of the next operation.

    With as many queries as keys, the gradients are views of one tensor, [s, b, n + 2 g, d].
    """

    scale: float

    needs_explicit_mask = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        s, b, n, _ = q.shape
        out = _empty(q, mask.cu_seqlens, n)
        rows = (b, n, s) if mask.cu_seqlens is None else (n, b * s)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        if not is_fake(q):
            q, k, v = (_to_kernel_layout(x, mask.cu_seqlens) for x in (q, k, v))
            flash4().forward(q, k, v, out=out, lse=lse, **self._options(mask))
        return _from_kernel_layout(out, b), _lse_from_kernel_layout(lse, b)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_fake(q):  # allocates about the same scratch memory
            Flash2(self.scale).backward(dout, q, k, v, out, lse, mask)
        cu_seqlens, b, n, g = mask.cu_seqlens, q.shape[1], q.shape[2], k.shape[2]
        if q.shape[0] == k.shape[0]:
            dq, dk, dv = _empty(q, cu_seqlens, n + 2 * g).split((n, g, g), dim=-2)
        else:
            dq, dk, dv = _empty(q, cu_seqlens, n), _empty(k, cu_seqlens, g), _empty(k, cu_seqlens, g)
        if not is_fake(q):
            q, k, v, out, dout = (_to_kernel_layout(x, cu_seqlens) for x in (q, k, v, out, dout))
            lse, options = _lse_to_kernel_layout(lse, cu_seqlens), self._options(mask) | determinism_options()
            flash4().backward(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, **options)
        dq, dk, dv = (_from_kernel_layout(x, b) for x in (dq, dk, dv))
        return dq, dk, dv

    def _options(self, mask: MaskSpec) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": self.scale, "causal": mask.is_causal}
        if mask.window is not None:
            options |= {"window_size_left": mask.window, "window_size_right": 0}
        if mask.cu_seqlens is not None:
            options |= mask.cu_seqlens._asdict()
        return options


@dataclass(frozen=True)
class TritonAttention:
    """megatrain's kernel, with softcaps and dropout; deterministic."""

    scale: float
    softcap: float | None = None

    needs_explicit_mask = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
        return fused.forward(q, k, v, mask, scale=self.scale, softcap=self.softcap)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: MaskSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = fused.backward(dout, q, k, v, out, lse, mask, scale=self.scale, softcap=self.softcap)
        return grads.q, grads.k, grads.v


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of the scores: 0, or -inf for masked keys."""
    return None if mask is None else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _empty(like: Tensor, cu_seqlens: CuSeqlens | None, heads: int) -> Tensor:
    """Allocate [s, b, heads, d] in the layout of `_to_kernel_layout`."""
    s, b, _, d = like.shape
    if cu_seqlens is not None:
        return like.new_empty(b * s, heads, d)
    return like.new_empty(s, b, heads, d).transpose(0, 1)


def _to_kernel_layout(x: Tensor, cu_seqlens: CuSeqlens | None) -> Tensor:
    """[s, b, n, d] -> [b, s, n, d], or concatenated samples, [b * s, n, d]."""
    x = x.transpose(0, 1)
    return x if cu_seqlens is None else x.flatten(0, 1)


def _from_kernel_layout(x: Tensor, b: int) -> Tensor:
    """Undo `_to_kernel_layout`."""
    return (x if x.dim() == 4 else x.unflatten(0, (b, -1))).transpose(0, 1)


def _lse_to_kernel_layout(lse: Tensor, cu_seqlens: CuSeqlens | None) -> Tensor:
    """[s, b, n] -> [b, n, s], or concatenated samples, [n, b * s]."""
    return (lse.permute(1, 2, 0) if cu_seqlens is None else lse.permute(2, 1, 0).flatten(1)).contiguous()


def _lse_from_kernel_layout(lse: Tensor, b: int) -> Tensor:
    """Undo `_lse_to_kernel_layout`."""
    return lse.permute(2, 0, 1) if lse.dim() == 3 else lse.unflatten(1, (b, -1)).permute(2, 1, 0)
