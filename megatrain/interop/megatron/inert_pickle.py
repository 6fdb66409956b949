"""Read pickles without running code: every class and function that a pickle names becomes an inert record.

    torch.Size((3, 32))                      ->  Record "torch.Size", arguments ((3, 32),)
    TensorStorageMetadata(size=.., ..)       ->  Record "...TensorStorageMetadata", state {"size": .., ..}
    cos, system, eval                        ->  records too: nothing is imported and nothing is called

A pickle is a program for a small machine whose only door to the outside is `find_class`; here it leads to `Record` and `dict` alone.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Self

_MAX_BYTES = 1 << 30
"""Largest pickle that is read: the index of a checkpoint of a million chunks has some 500 MB."""


class Record:
    """An object of a pickle, never built: what it was built from."""

    path: str = ""
    """Module and name of the class or function."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        record = object.__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __init__(self, *_: Any) -> None:
        """Take the arguments; `__new__`, which alone is called for some pickles, has kept them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *arguments: Any) -> Record:
        """Stand for the result of a call."""
        return Record(*arguments)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an item of a mapping; it is not kept."""

    def append(self, value: Any) -> None:
        """Take an item of a list; it is not kept."""

    def field(self, name: str) -> Any:
        """Return a field of the state.

        Raises:
            ValueError: there is none.
        """
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{self.path} has no {name}")
        return self.state[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> type[Any]:
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict  # states of models are ordered dictionaries
        return type("Record", (Record,), {"path": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def path_of(value: Any) -> str:
    """Return the path of a record or of a class that a pickle names, such as `torch.float32`; "" for other values."""
    kind = value if isinstance(value, type) else type(value)
    return kind.path if issubclass(kind, Record) else ""


def read_pickle(data: bytes) -> Any:
    """Return the object of a pickle; objects of classes are records. Persistent ids stand for themselves.

    Raises:
        ValueError: the data is no pickle, or too large.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {_MAX_BYTES}")
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"not a valid pickle ({type(error).__name__}: {str(error)[:200]})") from error
