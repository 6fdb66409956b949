"""Runs a training step on the meta device and records the storages that a real step would allocate.

    with meta_device_as(as_cuda=True) as operations:       torch is patched, see below
        with StorageLedger(run=operations.run) as ledger:  every operation passes through the ledger
            engine.step(...)                               the engine's own code
    ledger.peak, ledger.live_at_peak()                     which storages are live when, and what allocated them

Meta tensors have sizes and no memory. Values read from them are 1. A ledger works on real tensors, too. It does not
see what an operation allocates and frees before it returns; its `workspace` function returns that.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

_PACKAGE: Final = __name__.partition(".")[0] + "."
_READ_SCALAR: Final = torch.ops.aten._local_scalar_dense.default
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operation: (operation, positional arguments, keyword arguments) -> its result."""


@contextlib.contextmanager
def patched(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes (owner, name, value) inside the context, for the whole process; restore them on exit."""
    saved = [(owner, name, vars(owner).get(name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(saved):
            if value is None:  # inherited from a base class
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def meta_device_as(*, as_cuda: bool) -> Iterator[MetaOperations]:
    """Let the engine's code run on meta tensors as on a GPU, or as on a CPU.

    Inside the context torch is patched for the whole process; no other thread may compute. The patch replaces:

        Tensor.is_cuda                                `as_cuda`: kernels are chosen by it
        Tensor.data_ptr, UntypedStorage.data_ptr      numbers that differ by storage: code compares addresses to find views
        Tensor.tolist                                 ones in place of values
        functional.scaled_dot_product_attention       the kernel that torch chooses on the planned device; on the meta
                                                      device it would choose another one, which saves other tensors

    TorchFunctionMode could replace the same functions for one thread, but torch disables it during backward passes.

    Yields:
        the `MetaOperations` that run the operations of the step.
    """
    with patched(
        (Tensor, "is_cuda", property(lambda _: as_cuda)),
        (Tensor, "data_ptr", _address),
        (torch.UntypedStorage, "data_ptr", storage_id),
        (Tensor, "tolist", _ones_list),
        (F, "scaled_dot_product_attention", functools.partial(_attention, as_cuda)),
    ):
        yield MetaOperations()


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a live storage, also one without memory."""
    number: int = storage._cdata
    return number


def _address(x: Tensor) -> int:
    return storage_id(x.untyped_storage()) + int(x.storage_offset()) * x.element_size()


def _ones_list(x: Tensor) -> Any:
    """Return nested lists of ones, as `Tensor.tolist` nests them."""
    return _one(x.dtype) if x.dim() == 0 else [_ones_list(row) for row in x]


def _one(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _attention(
    as_cuda: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that torch chooses on the planned device: [b, n, s, d], in that kernel's memory layout.

    On a GPU: flash attention in 16 bits (cuDNN saves the same tensors), the memory-efficient kernel in fp32 and for values
    narrower than keys, the unfused one in fp64. On a CPU: flash attention, the unfused one for such values and for a mask that is
    differentiated.
    """
    is_narrow = v.shape[-1] != q.shape[-1]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)  # saved in place of the mask
    is_differentiable = attn_mask is not None and attn_mask.requires_grad
    if not as_cuda and not is_narrow and not is_differentiable:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    elif q.dtype in (torch.bfloat16, torch.float16) and attn_mask is None and not is_narrow:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out = kernel(q, k, v, dropout_p, is_causal, scale=scale)[0]
    else:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        if q.dtype == torch.float64 or not as_cuda:
            kernel = torch.ops.aten._scaled_dot_product_attention_math
            out = kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
        else:
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            out = kernel(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    assert isinstance(out, Tensor)
    return out


class MetaOperations:
    """Runs operations on meta tensors, with a cache of result sizes by operation and argument sizes.

    An operation runs once for each combination of argument sizes; afterwards its result is allocated from the cache.
    In-place operations change no size and are skipped. Operations on real tensors are passed to torch.
    """

    def __init__(self) -> None:
        self._factories: dict[Any, Any] = {}
        self._effects: dict[Any, _MemoryEffect] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation."""
        if func is _READ_SCALAR and args[0].is_meta:
            return _one(args[0].dtype)
        effect = self._effects.get(func)
        if effect is None:
            effect = self._effects[func] = _MemoryEffect(func)
        if effect.is_in_place and all(_is_meta(target) for target in effect.targets(args, kwargs)):
            return effect.in_place_result(args, kwargs)
        if not effect.allocates_results:
            return func(*args, **kwargs)
        key = (func, _key(args), tuple([(name, _key(value)) for name, value in kwargs.items()]))
        factory = self._factories.get(key)
        if factory is not None:
            return _created(factory)
        result = func(*args, **kwargs)
        if _is_meta(result) and not _storages(result) & _storages((args, *kwargs.values())):
            self._factories[key] = _factory(result)
        return result


class _MemoryEffect:
    """The effect of an operation on memory, by its schema.

    Attributes:
        allocates_results: it returns tensors, and all of them have new storages.
        is_in_place: it only writes into arguments, and returns some of them or nothing.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        has_tensors = any("Tensor" in str(part.type) for part in schema.returns)
        self.allocates_results = has_tensors and not any(
            part.alias_info for part in (*schema.arguments, *schema.returns)
        )
        written = {
            frozenset(argument.alias_info.before_set): (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        returned = [
            frozenset(one.alias_info.before_set) if one.alias_info else None for one in schema.returns
        ]
        self.is_in_place = (
            bool(written)
            and torch.Tag.inplace_view not in func.tags
            and all(one in written for one in returned)
        )
        self._written = list(written.values())
        self._returned = [written[one] for one in returned if one is not None] if self.is_in_place else []

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the operation writes into."""
        return [_argument(args, kwargs, one) for one in self._written]

    def in_place_result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments that an in-place operation returns."""
        found = [_argument(args, kwargs, one) for one in self._returned]
        return None if not found else found[0] if len(found) == 1 else tuple(found)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[int, str]) -> Any:
    position, name = where
    return kwargs[name] if name in kwargs else args[position]


def _is_meta(value: Any) -> bool:
    """Return whether a tensor, or every tensor of several, is on the meta device. None counts as meta."""
    if isinstance(value, Tensor):
        return value.is_meta
    return not isinstance(value, (tuple, list)) or all(_is_meta(item) for item in value)


def _storages(value: Any) -> set[int]:
    """Return the storages of a tensor or of several. `aten._unsafe_view` returns its argument's, which its schema does not say."""
    return {storage_id(tensor.untyped_storage()) for tensor in _tensors(value)}


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.stride(), value.device)
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])  # a list is faster than a generator
    return (type(value), value)


def _factory(result: Any) -> Any:
    """Return the result with each tensor replaced by a function that creates such a tensor."""
    if isinstance(result, Tensor):
        return functools.partial(
            torch.empty_strided, result.shape, result.stride(), dtype=result.dtype, device="meta"
        )
    return type(result)(_factory(item) for item in result) if isinstance(result, (tuple, list)) else result


def _created(factory: Any) -> Any:
    if isinstance(factory, functools.partial):
        return factory()
    return (
        type(factory)(_created(item) for item in factory) if isinstance(factory, (tuple, list)) else factory
    )


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of one tensor, or of several that are views of it."""

    num_bytes: int
    """As the allocator rounds it."""
    allocated_at: int
    """Number of the event. Events are allocations and frees, counted from 1."""
    activity: object
    """Result of `StorageLedger.current_activity` at the time."""
    creator: CodeType | None
    """The innermost function of megatrain on the stack."""
    freed_at: int | None = None
    outlives_activity: bool = True
    """True unless it was freed during the same activity."""


@dataclass(frozen=True)
class Peak:
    """The time at which the most bytes are live."""

    num_bytes: int = 0
    event: int = 0
    activity: object = None
    creator: CodeType | None = None
    workspace: int = 0
    """Bytes of `num_bytes` that are the workspace of the operation at the peak."""


def run_with_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation without changes."""
    return func(*args, **kwargs)


class StorageLedger(TorchDispatchMode):
    """Record of all storages that are allocated and freed while it is entered.

    It also patches `UntypedStorage.resize_` while it is entered, as resizing a storage allocates or frees its memory.

    Args:
        run: runs an operation.
        round_bytes: bytes that the allocator takes for a tensor of this many bytes.
        workspace: bytes that an operation allocates and frees while it runs.
        host_creators: functions of megatrain whose tensors are in host memory and do not count.

    Attributes:
        num_bytes: bytes that are live now.
        num_operations: operations while something runs by `current_activity`.
        current_activity: returns what runs now; activities are compared by identity.
    """

    def __init__(
        self,
        *,
        run: Run = run_with_torch,
        round_bytes: Callable[[int], int] = int,
        workspace: Callable[[Any, tuple[Any, ...]], int] = lambda *_: 0,
        host_creators: Sequence[CodeType] = (),
    ) -> None:
        super().__init__()
        self.current_activity: Callable[[], object] = lambda: None
        self.storages: list[Storage] = []
        self.peak = Peak()
        self.num_bytes = self.num_events = self.num_operations = 0
        self._run = run
        self._round_bytes = round_bytes
        self._workspace = workspace
        self._host_creators = host_creators
        self._on_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}
        self._patches = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call `__torch_dispatch__` without the wrapper against its compiler, which takes a tenth of the time."""
        return False

    def live_at_peak(self) -> list[Storage]:
        """Return the storages that are live at the peak."""
        event = self.peak.event
        return [
            s for s in self.storages if s.allocated_at <= event and (s.freed_at is None or s.freed_at > event)
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, kwargs or {})
        self.num_operations += self.current_activity() is not None
        for tensor in _tensors(result):
            self._record_allocation(tensor.untyped_storage())
        extra = self._workspace(func, args)
        if self.num_bytes + extra > self.peak.num_bytes:
            self.peak = Peak(
                self.num_bytes + extra, self.num_events, self.current_activity(), _creator(), extra
            )
        return result

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            self._record_free(storage_id(storage))
            self._record_allocation(storage)
            return result

        self._patches.enter_context(patched((torch.UntypedStorage, "resize_", resize_and_record)))
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _record_allocation(self, storage: torch.UntypedStorage) -> None:
        """Record a storage, unless it is known or empty."""
        key = storage_id(storage)
        if key in self._live or key in self._on_host or not storage.nbytes():
            return
        creator = _creator()
        if creator in self._host_creators:
            self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key, None))
            return
        self.num_events += 1
        record = Storage(
            self._round_bytes(storage.nbytes()), self.num_events, self.current_activity(), creator
        )
        self.storages.append(record)
        self._live[key] = record, weakref.ref(storage, lambda _: self._record_free(key))
        self.num_bytes += record.num_bytes

    def _record_free(self, key: int) -> None:
        if key not in self._live:
            return  # its memory was freed before by resizing
        record, _ = self._live.pop(key)
        self.num_events += 1
        record.freed_at = self.num_events
        record.outlives_activity = record.activity is not self.current_activity()
        self.num_bytes -= record.num_bytes


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _creator() -> CodeType | None:
    """Return the innermost function of megatrain on the stack, without functions of this file."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_PACKAGE) and name != __name__:
            return frame.f_code
        frame = frame.f_back  # type: ignore[assignment]
    return None
