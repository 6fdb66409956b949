"""Keeps account of storages: which live when, what made them, and when they are largest together.

    operation ─> a storage not seen before: born        its last reference goes: died        peak: the most bytes at once

A `Ledger` watches every operation, whether tensors have memory or not. What an operation takes for itself and gives
back before it returns is not seen; `work_space` tells it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OWN_PACKAGE = __name__.partition(".")[0] + "."


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""An operation, its arguments by place and by name -> its result."""


def run_as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch do it."""
    return func(*args, **kwargs)


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of one tensor or of several that are views of it."""

    num_bytes: int
    """As the allocator counts."""
    born: int
    """Events are births and deaths, counted from 1."""
    moment: object
    """What went on when it was made."""
    maker: CodeType | None
    """The innermost function of this package that made it."""
    died: int | None = None
    outlives_moment: bool = True
    """Whether it was still there when something else went on."""


@dataclass(frozen=True)
class Peak:
    """When the most bytes were held."""

    num_bytes: int = 0
    event: int = 0
    moment: object = None
    maker: CodeType | None = None
    work_space: int = 0
    """Of `num_bytes`, what the operation at that time took for itself."""


class Ledger(TorchDispatchMode):
    """Watches what is done while it is entered.

    Args:
        run: runs an operation with its arguments.
        rounded: bytes that the allocator takes for so many.
        work_space: bytes that an operation takes for itself while it runs.
        on_host: functions of this package whose tensors are in the host's memory, and do not count.

    Attributes:
        num_bytes: held now.
        moment: tells what goes on; asked at each birth and death, told apart by identity.
    """

    def __init__(
        self,
        *,
        run: Run = run_as_it_is,
        rounded: Callable[[int], int] = int,
        work_space: Callable[[Any, tuple[Any, ...]], int] = lambda *_: 0,
        on_host: Sequence[CodeType] = (),
    ) -> None:
        super().__init__()
        self.moment: Callable[[], object] = lambda: None
        self.storages: list[Storage] = []
        self.peak = Peak()
        self._run = run
        self._rounded = rounded
        self._work_space = work_space
        self._on_host = on_host
        self._left_out: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resizing = contextlib.ExitStack()
        self._living: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}
        self.num_bytes = self._event = 0

    @property
    def num_events(self) -> int:
        """Births and deaths so far."""
        return self._event

    def living_at_peak(self) -> list[Storage]:
        """What is held when the most bytes are."""
        event = self.peak.event
        return [s for s in self.storages if s.born <= event and (s.died is None or s.died > event)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, kwargs or {})
        for tensor in _tensors(result):
            self._see(tensor.untyped_storage())
        extra = self._work_space(func, args)
        if self.num_bytes + extra > self.peak.num_bytes:
            self.peak = Peak(self.num_bytes + extra, self._event, self.moment(), _maker(), extra)
        return result

    def __enter__(self) -> Self:
        self._resizing.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resizing_for(self)))
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._resizing.close()

    def note_size(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now: what it was has died, and what it is was born."""
        key = storage_key(storage)
        if key in self._living:
            self._lose(key)
        if storage.nbytes():
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._living or key in self._left_out or not storage.nbytes():
            return
        maker = _maker()
        if maker in self._on_host:
            self._left_out[key] = weakref.ref(storage, lambda _: self._left_out.pop(key, None))
            return
        self._event += 1
        account = Storage(self._rounded(storage.nbytes()), self._event, self.moment(), maker)
        self.storages.append(account)
        self._living[key] = account, weakref.ref(storage, lambda _: self._lose(key))
        self.num_bytes += account.num_bytes

    def _lose(self, key: int) -> None:
        if key not in self._living:
            return  # it had been given back before
        account, _ = self._living.pop(key)
        self._event += 1
        account.died = self._event
        account.outlives_moment = account.moment is not self.moment()
        self.num_bytes -= account.num_bytes


def _resizing_for(ledger: Ledger) -> Callable[[torch.UntypedStorage, int], Any]:
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        ledger.note_size(storage)
        return result

    return resize_and_tell


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same number for the same living memory, also where it has no address."""
    key: int = storage._cdata
    return key


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)


def _maker() -> CodeType | None:
    """The function of this package that is nearest on the stack, this file aside."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN_PACKAGE) and not name.startswith(_HELPERS):
            return frame.f_code
        frame = frame.f_back  # type: ignore[assignment]
    return None


_HELPERS = (__name__, f"{_OWN_PACKAGE}training.shadow")
