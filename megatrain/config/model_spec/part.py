"""A part of a layer: attention, or what replaces it, an MLP, experts, or a part of the user's own.

    part ──> linears()   all that counts, names or splits GEMMs
    part ──> module      what computes it (`model/parts.py`; a part of the user's own names its module itself)

A part is a frozen dataclass without torch. Its class attributes say how it fits into a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from megatrain.config.model_spec.linear import Linear

MAX_SCAN_STATE: Final = 128 * 128
"""Numbers of a head's state that the kernels of scans support."""
Role = Literal["mixer", "mlp"]
"""A mixer reads other tokens of a sample; an MLP computes each token by itself."""


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Memory that a part keeps for a sequence that is generated, on one tensor rank."""

    window: int | None = None
    """Number of earlier tokens whose rows it reads; None: all."""
    is_of_memory: bool = False
    """The rows are of the memory, the output of another stack, not of the sequence."""
    rows: tuple[tuple[int, int], ...] = ()
    """Heads and channels of each tensor with a row per token."""
    states: tuple[tuple[int, ...], ...] = ()
    """Shape of each tensor per sequence, in the accumulation dtype."""


class Part:
    """Base of the parts of a layer."""

    name: ClassVar[str]
    """Prefix of the canonical names of its parameters, below the layer."""
    role: ClassVar[Role]
    module: ClassVar[Any] = None
    """Module of a part of the user's own: a class called with the part and a `LayerContext`. None: `model/parts.py` knows it."""
    needs_whole_samples: ClassVar[bool] = False
    """True: its module cannot split samples over context ranks, nor stop at the end of a document."""

    def linears(self, hidden_size: int) -> Iterator[Linear]:
        """Yield the GEMMs."""
        raise NotImplementedError(f"{type(self).__name__} has no linears()")

    def other_weights(self, hidden_size: int) -> int:  # noqa: ARG002 (a size of some parts)
        """Return the multiplications per token apart from GEMMs, such as those of a convolution."""
        return 0

    @property
    def pair_channels(self) -> int:
        """Channels of all heads in the two products of a pair of tokens: scores, and their use."""
        return 0

    @property
    def exchanged_heads(self) -> tuple[int, int] | None:
        """Groups, and heads that share them, which context ranks exchange for whole samples; None: they do not."""
        return None

    def cache_sizes(self, num_ranks: int) -> CacheSizes | None:  # noqa: ARG002 (sizes of a rank)
        """Return its memory in text generation on one of `num_ranks` tensor ranks; None: it cannot generate text."""
        return None if self.role == "mixer" else CacheSizes()
