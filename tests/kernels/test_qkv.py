"""Heads as one tensor: without a copy if they are views of it, and only then."""

import pytest
import torch

from megatrain.kernels.qkv import concat, concat_heads, copy_heads, fused_view

SIZES = (4, 2, 2)


def heads(s: int = 3, b: int = 2) -> torch.Tensor:
    return torch.arange(s * b * 8 * 5, dtype=torch.float32).view(s, b, 8, 5)


@pytest.mark.parametrize("b", [1, 2])
def test_views_of_one_tensor_are_not_copied(b: int) -> None:
    whole = heads(b=b)
    found = concat_heads(whole.split(SIZES, dim=2))
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()


def test_the_layout_of_one_sample_does_not_matter() -> None:
    parts = heads(s=3, b=1).view(1, 3, 8, 5).transpose(0, 1).split(SIZES, dim=2)
    assert fused_view(parts) is not None
    assert torch.equal(concat_heads(parts), heads(s=3, b=1))


@pytest.mark.parametrize(
    "parts",
    [
        [part.clone() for part in heads().split(SIZES, dim=2)],
        heads().split(SIZES, dim=2)[::-1],
        heads().split(SIZES, dim=2)[:2],
        heads()[:, :1].split(SIZES, dim=2),
        heads().transpose(0, 1).split(SIZES, dim=2),
        [heads().split(SIZES, dim=2)[0], *heads().split(SIZES, dim=2)[1:]],
    ],
    ids=["copies", "another order", "a part is missing", "of a sample", "transposed", "of two tensors"],
)
def test_other_parts_are_copied(parts: list[torch.Tensor]) -> None:
    assert fused_view(parts) is None
    assert torch.equal(concat_heads(parts), torch.cat(list(parts), dim=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "first"), [(8, 0), (8, 4), (8, 1), (6, 0), (7, 2)])
@pytest.mark.parametrize("dim", [2, -1])
def test_strided_parts_are_concatenated(dtype: torch.dtype, width: int, first: int, dim: int) -> None:
    """Sizes and offsets allow words of 8 bytes, or not."""
    wide = torch.randn(3, 2, 4, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = (wide[..., first : first + width], wide[..., :width].transpose(0, 1).contiguous().transpose(0, 1))
    found = concat(parts, dim)
    assert found.dtype is dtype
    assert torch.equal(found, torch.cat(parts, dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("width", "first"), [(8, 0), (8, 4), (8, 1), (6, 0), (7, 2)])
@pytest.mark.parametrize("num_heads", [1, 5])
def test_heads_are_copied_into_other_channels(
    dtype: torch.dtype, width: int, first: int, num_heads: int
) -> None:
    source = torch.randn(3, 2, num_heads, 16).to(dtype)[..., first : first + width]
    target = torch.zeros(3, 2, 5, 16, dtype=dtype)
    copy_heads(target[..., first : first + width], source)
    assert torch.equal(target[..., first : first + width], source.expand(3, 2, 5, width))
    assert not target[..., :first].any()
    assert not target[..., first + width :].any()
