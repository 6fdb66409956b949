"""Two runs that must give the same result: one process, and a layout that may be stopped and resumed.

    words ──> flags of both runs, flags of the layout, number of ranks ──> the command lines of each

A word is a value of an option (options.py), such as `tp2 sp mixtral blend resumes`.
"""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from megatrain.config import ConfigError
from megatrain.tools.parity.models import OF_FAMILIES
from megatrain.tools.parity.runs.options import (
    ALWAYS,
    BASE,
    DTYPES,
    IS_LAYOUT,
    OPTION_OF,
    OPTIONS,
    SENTENCES,
    SIZES,
)

Flag = tuple[str, ...]
"""A flag and its values, such as `("--num-layers", "4")`."""
STOPPED: Final = 75
"""Exit code of a run that --exit-interval has stopped."""


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    flags: tuple[Flag, ...]
    num_ranks: int
    exit_code: int = 0
    """The expected one."""

    def words(self, save: Path) -> list[str]:
        """Return the command line without the program; the run saves to a folder and continues what it finds there."""
        words = [word for flag in self.flags for word in flag]
        return [*words, "--save", str(save), "--load", str(save)]

    def command(self, save: Path) -> str:
        program = "python" if self.num_ranks == 1 else f"torchrun --nproc-per-node {self.num_ranks}"
        return f"{program} pretrain.py {shlex.join(self.words(save))}"


@dataclass(frozen=True)
class Case:
    """Both runs. Its parts can be removed one by one, to find the smallest case that still fails."""

    shared: tuple[Flag, ...]
    """Flags of both runs that may be removed."""
    layout: tuple[Flag, ...]
    """Flags of the layout alone."""
    num_ranks: int
    restart: str = ""
    """`resumes`, `fromone`, `toone`, or empty: the layout's run is not stopped."""
    dtype: str = ""
    """Number format; empty: fp64."""
    has_chunks: bool = False
    """The layout computes the loss in chunks of a few tokens."""
    base: tuple[Flag, ...] = ()
    """Flags of both runs that stay."""

    @classmethod
    def of(cls, words: Sequence[str], data: Path) -> Case:
        """Return the case of these words, with the datasets in a folder.

        Raises:
            ConfigError: an unknown word.
        """
        unknown = [word for word in words if word not in OPTION_OF]
        if unknown:
            raise ConfigError(
                f"{' '.join(unknown)}: no such word", fix=f"the words are {', '.join(sorted(OPTION_OF))}"
            )
        given = {OPTION_OF[word]: word for word in words}
        usual = {option: next(iter(values)) for option, values in ALWAYS.items()}
        if given.get("model") in OF_FAMILIES:
            usual["data"] = SENTENCES
        texts = {option: OPTIONS[option][word] for option, word in (usual | given).items()}
        flags = {
            option: flags_of(text.replace("{data}", str(data))) for option, text in texts.items() if text
        }
        dtype = given.get("dtype", "")
        return cls(
            shared=merged(flag for option, own in flags.items() if option not in IS_LAYOUT for flag in own),
            layout=merged(flag for option, own in flags.items() if option in IS_LAYOUT for flag in own),
            num_ranks=math.prod(size_of(given.get(option, "")) for option in SIZES),
            restart="resumes" if dtype else given.get("restart", ""),
            dtype=dtype,
            has_chunks="loss chunks" in given,
            base=flags_of(BASE),
        )

    @property
    def is_exact(self) -> bool:
        """True if the reference is the same layout in the same number format, not stopped: every bit is compared."""
        return bool(self.dtype)

    @property
    def reference(self) -> Start:
        """One process, or the layout itself where bits are compared."""
        return self._start(has_layout=self.is_exact)

    @property
    def unbroken(self) -> Start:
        """The layout's run, not stopped."""
        return self._start(has_layout=True)

    @property
    def starts(self) -> tuple[Start, ...]:
        """The starts of the layout's run: two if it is stopped."""
        if not self.restart:
            return (self.unbroken,)
        first = self._start(has_layout=self.restart != "fromone")
        stopped = replace(first, flags=(*first.flags, ("--exit-interval", "2")), exit_code=STOPPED)
        return stopped, self._start(has_layout=self.restart != "toone")

    def commands(self, folder: Path) -> Iterator[str]:
        """Yield the commands of both runs."""
        yield self.reference.command(folder / "reference")
        yield from (start.command(folder / "layout") for start in self.starts)

    def _start(self, *, has_layout: bool) -> Start:
        flags = merged(
            [
                *self.base,
                *flags_of(DTYPES.get(self.dtype, "")),
                *self.shared,
                *(self.layout if has_layout else ()),
            ]
        )
        return Start(flags, self.num_ranks if has_layout else 1)


@functools.cache
def flags_of(text: str) -> tuple[Flag, ...]:
    """Cut a command line into flags with their values."""
    found: list[list[str]] = []
    for word in text.split():
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return tuple(map(tuple, found))


def merged(flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """Keep the last of the flags with the same name."""
    return tuple({flag[0]: flag for flag in flags}.values())


def size_of(word: str) -> int:
    """Return the number at the end of a word, such as 2 for `tp2`; 1 if there is none."""
    return int(word.lstrip("abcdefghijklmnopqrstuvwxyz") or 1)
