"""Read pickles without running code: a small machine of our own, whose objects are inert records.

    torch.Size((3, 32))                      ->  Record "torch.Size", arguments ((3, 32),)
    TensorStorageMetadata(size=.., ..)       ->  Record "...TensorStorageMetadata", state {"size": .., ..}
    cos, system, eval                        ->  records too: nothing is imported and nothing is called

The machine knows the opcodes that Python writes in protocol 2 and later. Time and memory are in proportion to the size of the data:
keys are hashed in constant time, and a value that is used many times counts each time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_MAX_BYTES: Final = 1 << 30
"""Largest pickle that is read: the index of a checkpoint of a million chunks has some 500 MB."""
_MAX_DEPTH: Final = 64
_MAX_INT_BYTES: Final = 16
_MAX_KEY_ITEMS: Final = 8
_UNFOLDED_PER_BYTE: Final = 4
"""Values for each byte of a pickle, each counted as often as it is used; files of Megatron-LM have less than one."""


class Record:
    """A class, a function or an object of a pickle, never imported or built: what it was built from."""

    __slots__ = ("arguments", "path", "state")

    def __init__(self, path: str, arguments: tuple[Any, ...] = ()) -> None:
        self.path = path
        """Module and name of the class or function."""
        self.arguments = arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """Return a field of the state.

        Raises:
            ValueError: there is none.
        """
        if not isinstance(self.state, dict) or name not in self.state:
            raise ValueError(f"{self.path} has no {name}")
        return self.state[name]


def path_of(value: Any) -> str:
    """Return the path of a record, such as `torch.float32`; "" for other values."""
    return value.path if isinstance(value, Record) else ""


def fields_of(value: Any) -> dict[str, Any]:
    """Return a dictionary, or the fields of a record as a dictionary."""
    found = value.state if isinstance(value, Record) else value
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__} where names and values were expected")
    return found


def read_pickle(data: bytes) -> Any:
    """Return the object of a pickle; objects of classes are records, sets too. Persistent ids stand for themselves.

    Raises:
        ValueError: the data is no pickle, too large, or nested without limit.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {_MAX_BYTES}")
    try:
        value = _Machine(data).run()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a valid pickle ({type(error).__name__}: {str(error)[:200]})") from error
    _check_extent(value, 1000 + _UNFOLDED_PER_BYTE * len(data))
    return value


class _Machine:
    """Runs the opcodes of a pickle: a stack, marks on it, and a memo."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Record] = {}

    def run(self) -> Any:
        """Return the object; the most frequent opcodes are run here."""
        data, stack, memo, others, place = self._data, self._stack, self._memo, _OPCODES, 0
        while (code := data[place]) != _STOP:
            place += 1
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _BINGET:
                stack.append(memo[data[place]])
                place += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[place : place + 4], "little")])
                place += 4
            elif code == _BININT1:
                stack.append(data[place])
                place += 1
            elif code in others:
                self._place = place
                others[code](self)
                place = self._place
            else:
                raise ValueError(f"opcode {code:#x} at byte {place - 1}")
        return stack.pop()

    def sized(self, width: int) -> bytes:
        """Return the data of an argument whose length has `width` bytes."""
        return self.take(self.number(width))

    def number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def take(self, length: int) -> bytes:
        start, self._place = self._place, self._place + length
        if self._place > len(self._data):
            raise ValueError(f"{length} bytes at byte {start} of {len(self._data)}")
        return self._data[start : self._place]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def push_long(self) -> None:
        length = self.number(1)
        if length > _MAX_INT_BYTES:
            raise ValueError(f"an integer of {length} bytes")
        self.push(self.number(length, signed=True))

    def push_float(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def to_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def push_tuple(self, length: int) -> None:
        if length > len(self._stack):
            raise ValueError(f"a tuple of {length} of {len(self._stack)} values")
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def append(self, items: list[Any]) -> None:
        """Append to a list; items of a record, which stands for a class of lists, are not kept."""
        if not isinstance(self._stack[-1], Record):
            _expect(self._stack[-1], list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Set items of a dictionary; items of a record, which stands for a class of mappings, are not kept."""
        target = self._stack[-1]
        if isinstance(target, Record):
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            _expect(target, dict)[key] = value

    def add_items(self) -> None:
        items = self.to_mark()
        _expect(_expect(self._stack[-1], Record).arguments[0], list).extend(items)

    def line(self) -> str:
        end = self._data.index(b"\n", self._place)
        return self.take(end + 1 - self._place)[:-1].decode()

    def name(self, module: str, name: str) -> None:
        """Push the class or function of a name."""
        path = f"{_expect(module, str)}.{_expect(name, str)}"
        self.push(self._globals.setdefault(path, Record(path)))

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def call(self) -> None:
        """Push what a call stands for: a dictionary for an ordered one, since states of models are, and records otherwise."""
        arguments, path = _expect(self.pop(), tuple), _expect(self.pop(), Record).path
        is_dict = path == "collections.OrderedDict" and not arguments
        self.push({} if is_dict else Record(path, arguments))

    def call_with_names(self) -> None:
        _expect(self.pop(), dict)
        self.call()

    def build(self) -> None:
        """Set the state of a record; attributes of a dictionary are not kept, such as `_metadata` of the state of a model."""
        state, target = self.pop(), self._stack[-1]
        if not isinstance(target, dict):
            _expect(target, Record).state = state


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1 = b".\x94hjK"
_OPCODES: Final[dict[int, Callable[[_Machine], None]]] = {
    ord(code): run
    for code, run in {
        b"\x80": lambda m: m.take(1),  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME
        b"N": lambda m: m.push(None),  # NONE
        b"\x88": lambda m: m.push(True),  # NEWTRUE
        b"\x89": lambda m: m.push(False),  # NEWFALSE
        b"M": lambda m: m.push(m.number(2)),  # BININT2
        b"J": lambda m: m.push(m.number(4, signed=True)),  # BININT
        b"\x8a": _Machine.push_long,  # LONG1
        b"G": _Machine.push_float,  # BINFLOAT
        b"\x8c": lambda m: m.push(m.sized(1).decode()),  # SHORT_BINUNICODE
        b"X": lambda m: m.push(m.sized(4).decode()),  # BINUNICODE
        b"\x8d": lambda m: m.push(m.sized(8).decode()),  # BINUNICODE8
        b"C": lambda m: m.push(m.sized(1)),  # SHORT_BINBYTES
        b"B": lambda m: m.push(m.sized(4)),  # BINBYTES
        b"\x8e": lambda m: m.push(m.sized(8)),  # BINBYTES8
        b"\x96": lambda m: m.push(m.sized(8)),  # BYTEARRAY8
        b"(": _Machine.mark,  # MARK
        b")": lambda m: m.push(()),  # EMPTY_TUPLE
        b"\x85": lambda m: m.push_tuple(1),  # TUPLE1
        b"\x86": lambda m: m.push_tuple(2),  # TUPLE2
        b"\x87": lambda m: m.push_tuple(3),  # TUPLE3
        b"t": lambda m: m.push(tuple(m.to_mark())),  # TUPLE
        b"]": lambda m: m.push([]),  # EMPTY_LIST
        b"a": lambda m: m.append([m.pop()]),  # APPEND
        b"e": lambda m: m.append(m.to_mark()),  # APPENDS
        b"}": lambda m: m.push({}),  # EMPTY_DICT
        b"s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),  # SETITEM
        b"u": lambda m: m.set_items(m.to_mark()),  # SETITEMS
        b"\x8f": lambda m: m.push(Record("builtins.set", ([],))),  # EMPTY_SET
        b"\x90": _Machine.add_items,  # ADDITEMS
        b"\x91": lambda m: m.push(Record("builtins.frozenset", (m.to_mark(),))),  # FROZENSET
        b"q": lambda m: m.put(m.number(1)),  # BINPUT
        b"r": lambda m: m.put(m.number(4)),  # LONG_BINPUT
        b"c": lambda m: m.name(m.line(), m.line()),  # GLOBAL
        b"\x93": _Machine.stack_name,  # STACK_GLOBAL
        b"R": _Machine.call,  # REDUCE
        b"\x81": _Machine.call,  # NEWOBJ
        b"\x92": _Machine.call_with_names,  # NEWOBJ_EX
        b"b": _Machine.build,  # BUILD
        b"Q": lambda m: m.push(m.pop()),  # BINPERSID
    }.items()
}
_KEYS: Final = (str, Record, type(None))
_NUMBERS: Final = (int, bool)
_CONTAINERS: Final = (list, tuple, dict, Record)


def _expect(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} where {kind.__name__} was expected")
    return value


def _check_key(key: Any) -> None:
    """Check that the hash of a key takes constant time, and that keys with equal hashes are hard to find."""
    kind = type(key)
    if kind in _KEYS or (kind in _NUMBERS and abs(key) < 1 << 60):
        return
    if kind is not tuple or len(key) > _MAX_KEY_ITEMS or not all(type(item) in _KEYS for item in key):
        raise ValueError(f"a {kind.__name__} as a key")


def _check_extent(root: Any, most: int) -> None:
    """Check how deep values are nested, and how many they are if each counts as often as it is used.

    Raises:
        ValueError: deeper than the limit, more than `most`, or a value within itself.
    """
    level, count = [root], 0
    for _ in range(_MAX_DEPTH):
        level = [value for value in level if type(value) in _CONTAINERS]
        count += sum(len(value.arguments) + 1 if type(value) is Record else len(value) for value in level)
        if not level:
            return
        if count > most:
            break
        level = [part for value in level for part in _parts(value)]
    raise ValueError(f"values are nested deeper than {_MAX_DEPTH} or used more than {most} times")


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Record):
        return (*value.arguments, value.state)
    return (*value, *value.values()) if isinstance(value, dict) else value
