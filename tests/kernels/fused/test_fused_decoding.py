"""Fused kernels of text generation against their references: split attention to a cache, and products with one row."""

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn, near
from kernel_reference import reference

from megatrain.kernels.attention.decode import decode_attention
from megatrain.kernels.fused import decode_attention as fused
from megatrain.kernels.fused.matrix_vector import matrix_vector

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
FIRST, COUNT = (300, 3, 1200), (800, 1, 130)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("programs", [1, 24], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("n", "g", "d", "dv", "options"),
    [
        (8, 2, 64, 64, {}),
        (4, 4, 24, 40, {"window": 70}),
        (6, 1, 128, 128, {"softcap": 2.0, "sink": True}),
        (2, 1, 256, 256, {"window": 3, "sink": True}),
    ],
    ids=str,
)
def test_decode_attention(
    dtype: torch.dtype,
    programs: int,
    n: int,
    g: int,
    d: int,
    dv: int,
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_PROGRAMS", programs)
    qkv = drawn(3, n + g, d, dtype=dtype)
    q, keys, values = (
        qkv[:, :n],
        drawn(1400, g, d, dtype=dtype, seed=1),
        drawn(1400, g, dv, dtype=dtype, seed=2),
    )
    first, count = (torch.tensor(x, device=DEVICE) for x in (FIRST, COUNT))
    options = options | {"sink": drawn(n, dtype=dtype, seed=3)} if "sink" in options else options
    found = fused.decode_attention(q, keys, values, first, count, scale=d**-0.5, **options)
    wide = [x.double() for x in (q, keys, values)]
    expected = reference(decode_attention)(*wide, first, count, scale=d**-0.5, **options)
    near(found, expected, dtype, 800)


def test_rows_of_new_tokens_are_written() -> None:
    keys, values = drawn(50, 2, 24), drawn(50, 2, 40)
    expected = keys.clone(), values.clone()
    qkv, written = drawn(3, 6, 24, seed=1), torch.tensor([7, 49, 0], device=DEVICE)
    k, v = qkv[:, 2:4], drawn(3, 2, 40, seed=2)
    fused.write_rows(keys, values, k, v, written)
    for rows, new in zip(expected, (k, v), strict=True):
        rows[written] = new
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(6, 2048), (7, 1024), (33, 40), (4, 1100)])
def test_product_with_one_row(dtype: torch.dtype, rows: int, columns: int) -> None:
    x, weight, bias = (
        drawn(1, 1, columns, dtype=dtype),
        drawn(rows, columns, dtype=dtype),
        drawn(rows, dtype=dtype),
    )
    expected = x.double() @ weight.double().t()
    near(matrix_vector(x, weight, None), expected, dtype, columns)
    near(matrix_vector(x, weight, bias), expected + bias, dtype, columns)
