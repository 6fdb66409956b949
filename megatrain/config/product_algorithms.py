"""The file of --product-algorithms: cuBLASLt's algorithms of bf16 products, which `megatrain tune` measures and writes.

    {"gpu": "NVIDIA H200", "cublaslt": 130100, "products": [{"m": 8192, "n": 4096, ..., "algorithm": "4200..."}]}

A product without an entry uses torch's choice. Algorithms have a meaning for one version of the library alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MEASURE_AGAIN: Final = "measure again with `megatrain tune`, or remove --product-algorithms"
_ALGORITHM_BYTES: Final = 64
"""Size of `cublasLtMatmulAlgo_t`."""
_TYPES_OF_FILE: Final[dict[str, type]] = {"gpu": str, "cublaslt": int, "products": list}
_TYPES_OF_PRODUCT: Final[dict[str, type]] = {
    "m": int, "n": int, "k": int, "transposes_a": bool, "transposes_b": bool, "accumulates": bool,
    "algorithm": str, "ms": float, "torch_ms": float,
}  # fmt: skip


class Product(NamedTuple):
    """A product of bf16 matrices, [m, k] by [k, n]: in bf16, or added to a matrix in fp32."""

    m: int
    n: int
    k: int
    transposes_a: bool
    """`a` is stored as [k, m]."""
    transposes_b: bool
    """`b` is stored as [n, k]."""
    accumulates: bool
    """The product is added to an fp32 matrix, as weight gradients are."""


@dataclass(frozen=True, kw_only=True)
class MeasuredAlgorithm:
    """An algorithm that is faster than torch's choice."""

    product: Product
    algorithm: str
    """The library's description, `cublasLtMatmulAlgo_t`, in hexadecimal digits."""
    ms: float
    torch_ms: float


@dataclass(frozen=True, kw_only=True)
class ProductAlgorithms:
    """The content of a file."""

    gpu: str
    cublaslt: int
    """Version of the library."""
    entries: tuple[MeasuredAlgorithm, ...]

    def __str__(self) -> str:
        return f"{len(self.entries)} product{'s' * (len(self.entries) != 1)}, measured on {self.gpu} with cuBLASLt {self.cublaslt}"

    def to_json(self) -> str:
        """Return the text of the file."""
        products = [
            {**one.product._asdict(), "algorithm": one.algorithm, "ms": one.ms, "torch_ms": one.torch_ms}
            for one in self.entries
        ]
        return json.dumps({"gpu": self.gpu, "cublaslt": self.cublaslt, "products": products}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ProductAlgorithms:
        """Read the text of a file. Raises ValueError with the reason."""
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("its brackets are nested too deeply") from None
        _check(content, _TYPES_OF_FILE, "it")
        entries: dict[Product, MeasuredAlgorithm] = {}
        for number, found in enumerate(content["products"], start=1):
            _check(found, _TYPES_OF_PRODUCT, f"product {number}")
            product = Product(*(found.pop(name) for name in Product._fields))
            if min(product[:3]) < 1 or len(bytes.fromhex(found["algorithm"])) != _ALGORITHM_BYTES:
                raise ValueError(
                    f"product {number} has a size below 1, or no algorithm of {_ALGORITHM_BYTES} bytes"
                )
            if product in entries:
                raise ValueError(f"product {number} has two entries")
            entries[product] = MeasuredAlgorithm(product=product, **found)
        return cls(gpu=content["gpu"], cublaslt=content["cublaslt"], entries=tuple(entries.values()))


def _check(value: Any, types: dict[str, type], subject: str) -> None:
    """Raise ValueError unless `value` is a JSON object with exactly these fields."""
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"{subject} is not an object with {', '.join(types)}")
    for name, kind in types.items():
        if type(value[name]) is not kind:
            raise ValueError(f"{subject} has {name} {value[name]!r}, which is not of type {kind.__name__}")


def digest_of(text: str) -> str:
    """Return the digest of a file's text, which a resumed run compares."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
