"""Formats of quantized linear layers as data: how weights and their inputs are rounded, and how the file stores them.

`kernels/quantization/` has the arithmetic, `tools/quantization/` the files, which the library compressed-tensors reads.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

Strategy = Literal["tensor", "channel", "group", "block", "token"]
SCALE_PREFIX: Final = "qat."
"""Start of the names of the scales of --qat, each followed by the name of its weight."""
BLOCK: Final = 128
"""Rows and columns of a block with a scale of its own, as DeepSeek-V3 has them."""


@dataclass(frozen=True)
class NumberFormat:
    """Numbers that a tensor is rounded to, with symmetric scales."""

    kind: Literal["int", "float"]
    num_bits: int
    strategy: Strategy
    """Values that share a scale: all, those of an output, of a group of inputs, of a square block, or of a token."""
    group_size: int | None = None
    """Inputs of a group."""

    @property
    def smallest(self) -> float:
        """The most negative number before its scale."""
        return -448.0 if self.kind == "float" else -(2.0 ** (self.num_bits - 1))

    @property
    def largest(self) -> float:
        """The largest number before its scale: of float8_e4m3fn, or of two's complement."""
        return 448.0 if self.kind == "float" else 2.0 ** (self.num_bits - 1) - 1

    @property
    def half_range(self) -> float:
        """The number that the largest absolute value becomes.

        Of integers it is half of their range and a little more: half a range lies between two numbers, where the last bit of a
        sum, which another layout adds in another order, would decide which of them is nearest.
        """
        return self.largest if self.kind == "float" else self.largest + 0.51

    def described(self, *, is_dynamic: bool) -> dict[str, Any]:
        """Return its entry in config.json, as compressed-tensors reads it."""
        sizes: dict[str, Any] = {} if self.group_size is None else {"group_size": self.group_size}
        if self.strategy == "block":
            sizes = {"block_structure": [BLOCK, BLOCK]}
        return {
            "num_bits": self.num_bits,
            "type": self.kind,
            "symmetric": True,
            "strategy": self.strategy,
            "dynamic": is_dynamic,
            **sizes,
        }


@dataclass(frozen=True)
class QuantizationFormat:
    """A format of the linear layers of a model."""

    weights: NumberFormat
    inputs: NumberFormat | None
    """Numbers that the inputs are rounded to when they are known; None: they are not rounded."""
    layout: str
    """Name that compressed-tensors has for the layout of its tensors."""
    text: str
    """Its help text."""

    @property
    def multiple(self) -> int:
        """Number that divides the inputs of each linear layer."""
        return BLOCK if self.weights.strategy == "block" else self.weights.group_size or 1


_TOKEN: Final = NumberFormat("float", 8, "token")
QUANTIZATION_FORMATS: Final = {
    "fp8-tensor": QuantizationFormat(
        NumberFormat("float", 8, "tensor"), _TOKEN, "float-quantized", "FP8, a scale for each weight"
    ),
    "fp8-channel": QuantizationFormat(
        NumberFormat("float", 8, "channel"), _TOKEN, "float-quantized", "FP8, a scale for each output"
    ),
    "fp8-block": QuantizationFormat(
        NumberFormat("float", 8, "block"),
        NumberFormat("float", 8, "group", BLOCK),
        "float-quantized",
        "FP8, a scale for 128 x 128 weights and for 128 channels of a token",
    ),
    "int8": QuantizationFormat(
        NumberFormat("int", 8, "channel"),
        NumberFormat("int", 8, "token"),
        "int-quantized",
        "INT8, a scale for each output",
    ),
    "int8-weights": QuantizationFormat(
        NumberFormat("int", 8, "channel"),
        None,
        "pack-quantized",
        "INT8 weights alone, a scale for each output",
    ),
    "int4": QuantizationFormat(
        NumberFormat("int", 4, "group", 128),
        None,
        "pack-quantized",
        "INT4 weights alone, a scale for each group",
    ),
}
"""Formats by name. Inputs are rounded where `text` does not say "weights alone", with a scale for each token."""
