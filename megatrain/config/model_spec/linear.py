"""Linear layers of a model as data. All that counts, names or splits GEMMs is a fold over them.

    qkv   hidden states [t, h] -> queries, keys, values       pieces q, k, v; tensor ranks split the outputs
    proj  heads [t, n d]       -> hidden states [t, h]        tensor ranks split the inputs

Readers: FLOPs (`model.py`), divisibility (`subjects/layers.py`), FP8 sizes (`subjects/fp8.py`), names of modules
(`module_precision.py`), `megatrain plan`, tensor splits of text generation (`inference/tensor_split.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Split = Literal["outputs", "inputs", "none"]
"""Dimension of the weight that tensor ranks split: column-parallel, row-parallel, or a copy on each rank."""


@dataclass(frozen=True)
class Piece:
    """Rows of a weight with a meaning of their own, such as the keys of a fused QKV projection."""

    name: str
    """Canonical name of its tensor, without the part's."""
    size: int
    heads: int = 0
    """Heads that the rows divide into, each on one rank; 0: ranks divide the rows."""
    what: str = ""
    """Name of the rows, for messages; empty: that of the outputs."""
    is_copied: bool = False
    """More tensor ranks than heads hold copies of them."""
    unit: str = "heads"
    """Name of the heads, for messages."""
    path: str = ""
    """The setting that has the number of heads or rows; empty: none."""

    def local_size(self, num_ranks: int) -> float:
        """Return the rows on one of `num_ranks` tensor ranks."""
        return self.size / (min(num_ranks, self.heads) if self.heads else num_ranks)

    @property
    def count(self) -> int:
        """Number of heads, or of rows without heads, which ranks divide."""
        return self.heads or self.size

    def divides_over(self, num_ranks: int) -> bool:
        """Return whether each rank can hold an equal share, or a copy."""
        return self.count % num_ranks == 0 or (self.is_copied and num_ranks % self.count == 0)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One GEMM of a layer: y = x W^T, with W [outputs, inputs]."""

    part: str
    """Prefix of the canonical names of its pieces, below the layer."""
    pieces: tuple[Piece, ...]
    """The outputs, in the order of the weight."""
    inputs: int
    split: Split
    reads: str = "hidden states"
    """Name of the inputs, for messages."""
    writes: str = "hidden states"
    """Name of the outputs."""
    flags: str = "--hidden-size, --tensor-model-parallel-size"
    """The settings that decide its sizes, for messages."""
    modules: tuple[str, ...] = field(default=())
    """Megatron-LM's names of the module below the layer; several if its modules are one GEMM here."""
    num_experts: int = 0
    """Routed experts that each have this GEMM, split over expert tensor ranks; 0: it is not of routed experts."""
    recipe: str = ""
    """Canonical name whose FP8 recipe applies, where several GEMMs share one; empty: that of `weight`."""
    top_k: int = 1
    """Times that it processes a token: experts per token."""

    @property
    def weight(self) -> str:
        """Canonical name of the first tensor of the weight, below the layer."""
        return f"{self.part}.{self.pieces[0].name}"

    @property
    def outputs(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def active_weights(self) -> int:
        """Weights that process a token, each as often as it does."""
        return self.top_k * self.inputs * self.outputs

    def local_outputs(self, num_ranks: int) -> float:
        """Return the outputs on one of `num_ranks` tensor ranks."""
        if self.split != "outputs":
            return self.outputs
        return sum(piece.local_size(num_ranks) for piece in self.pieces)

    def local_inputs(self, num_ranks: int) -> float:
        """Return the inputs on one of `num_ranks` tensor ranks."""
        return self.inputs / num_ranks if self.split == "inputs" else self.inputs
