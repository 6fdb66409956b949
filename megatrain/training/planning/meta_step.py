"""A step without memory: tensors on the meta device that pass for those of a GPU or a CPU.

    plan ─> Engine on the meta device ─> its own step, inside a `shadow` ─> the storages that a real one would make

Sizes are all that there is: numbers read from a tensor are 1. Kernels see `is_cuda` as on the device that is planned
for, and attention makes there what the fused kernel of that device makes. For that, a few names of torch mean something else inside, for the whole process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.training.planning.storage_ledger import storage_key

_READ = torch.ops.aten._local_scalar_dense.default


@contextlib.contextmanager
def shadow(*, of_gpu: bool) -> Iterator[Sizes]:
    """Everything inside that works on the meta device passes for work on a GPU, or on a CPU; `Sizes` is to run it."""
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (Tensor, "is_cuda", property(lambda _: of_gpu)),
            (Tensor, "data_ptr", _address),
            (torch.UntypedStorage, "data_ptr", storage_key),
            (Tensor, "tolist", _ones),
            (F, "scaled_dot_product_attention", functools.partial(_attention, of_gpu)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield Sizes()


def _address(x: Tensor) -> int:
    """Another number for each storage and each place in it."""
    return storage_key(x.untyped_storage()) + int(x.storage_offset()) * x.element_size()


def _ones(x: Tensor) -> Any:
    """As `tolist` gives it."""
    return _one(x.dtype) if x.dim() == 0 else [_ones(row) for row in x]


def _attention(
    of_gpu: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's own choice makes: [b, n, s, d], laid out as the kernel of that device lays it out.

    On a GPU the flash kernel (cuDNN's keeps the same) in 16 bits, the memory-efficient one in fp32, both written out in fp64.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)  # kept in place of the mask
    if not of_gpu:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    elif q.dtype in (torch.bfloat16, torch.float16) and attn_mask is None:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out = kernel(q, k, v, dropout_p, is_causal, scale=scale)[0]
    else:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        if q.dtype == torch.float64:
            kernel = torch.ops.aten._scaled_dot_product_attention_math
            out = kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
        else:
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            out = kernel(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    assert isinstance(out, Tensor)
    return out


class Sizes:
    """Runs an operation once for arguments of the same sizes, and makes results of the sizes that it found after that.

    What changes tensors in place changes no size and is not run at all. Tensors with memory are left to torch.
    """

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}
        self.kinds: dict[Any, _Kind] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation."""
        if func is _READ and args[0].is_meta:
            return _one(args[0].dtype)
        if func not in self.kinds:
            self.kinds[func] = _Kind(func)
        kind = self.kinds[func]
        if kind.writes is not None and all(_are_meta(target) for target in kind.targets(args, kwargs)):
            return kind.written(args, kwargs)
        if not kind.makes_new:
            return func(*args, **kwargs)
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key in self.found:
            return _made(self.found[key])
        result = func(*args, **kwargs)
        if _are_meta(result):
            self.found[key] = _form(result)
        return result


class _Kind:
    """What an operation does with memory, by its schema.

    Attributes:
        makes_new: whether it returns tensors, and all of them new.
        writes: place and name of the arguments that it writes into, if it does nothing else.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        has_tensors = any("Tensor" in str(part.type) for part in schema.returns)
        self.makes_new = has_tensors and not any(
            part.alias_info for part in (*schema.arguments, *schema.returns)
        )
        written = {
            frozenset(argument.alias_info.before_set): (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        returned = [
            frozenset(one.alias_info.before_set) if one.alias_info else None for one in schema.returns
        ]
        is_plain = torch.Tag.inplace_view not in func.tags and all(one in written for one in returned)
        self.writes = list(written.values()) if written and is_plain else None
        self._returned = [written[one] for one in returned if one is not None] if self.writes else []

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What it writes into."""
        assert self.writes is not None
        return [_argument(args, kwargs, one) for one in self.writes]

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it returns."""
        found = [_argument(args, kwargs, one) for one in self._returned]
        return None if not found else found[0] if len(found) == 1 else tuple(found)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[int, str]) -> Any:
    place, name = where
    return kwargs[name] if name in kwargs else args[place]


def _one(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _are_meta(value: Any) -> bool:
    """Whether a tensor, or all of several, have no memory. None has none to have."""
    if isinstance(value, Tensor):
        return value.is_meta
    return not isinstance(value, (tuple, list)) or all(_are_meta(item) for item in value)


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    return (type(value), value)


def _form(result: Any) -> Any:
    """A function that makes such a result anew, for each tensor in it."""
    if isinstance(result, Tensor):
        return functools.partial(
            torch.empty_strided, result.shape, result.stride(), dtype=result.dtype, device="meta"
        )
    return type(result)(_form(item) for item in result) if isinstance(result, (tuple, list)) else result


def _made(form: Any) -> Any:
    if isinstance(form, functools.partial):
        return form()
    return type(form)(_made(item) for item in form) if isinstance(form, (tuple, list)) else form
