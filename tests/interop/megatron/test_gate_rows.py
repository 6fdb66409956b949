"""The rows of Megatron-LM's fused QKV projection, with and without an output gate."""

import pytest

from megatrain.interop.megatron.names import FusedRows, parts_of


def heads(*numbers: int) -> tuple[slice, ...]:
    """Return the rows of runs of heads of 8 rows: `first, last, first, last, ...`."""
    return tuple(slice(8 * a, 8 * b) for a, b in zip(numbers[::2], numbers[1::2], strict=True))


@pytest.mark.parametrize(
    ("has_output_gate", "num_heads", "expected"),
    [
        (False, 8, {"q": heads(0, 2, 4, 6), "k": heads(2, 3, 6, 7), "v": heads(3, 4, 7, 8)}),
        (
            True,
            12,
            {
                "q": heads(0, 2, 6, 8),
                "gate": heads(2, 4, 8, 10),
                "k": heads(4, 5, 10, 11),
                "v": heads(5, 6, 11, 12),
            },
        ),
    ],
)
def test_a_fused_projection_stores_query_group_by_query_group(
    has_output_gate: bool, num_heads: int, expected: dict[str, tuple[slice, ...]]
) -> None:
    fused = FusedRows(4, 2, is_gated=True, has_output_gate=has_output_gate)
    name = "decoder.layers.self_attention.linear_qkv.weight"
    parts = list(parts_of(name, (3, 8 * num_heads, 32), fused))
    assert {part.name: part.rows for part in parts if part.place == (1,)} == {
        f"decoder.layers.1.attention.{part}.weight": rows for part, rows in expected.items()
    }
    assert len(parts) == 3 * len(expected)
