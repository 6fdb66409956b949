"""Planted faults name valid layouts."""

import pytest

from megatrain.tools.parity.faults import FAULTS
from megatrain.tools.parity.rows import Layout, is_row


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_a_layout_of_several_ranks(fault: str) -> None:
    layout = Layout.of(FAULTS[fault].layout)
    assert layout.world_size > 1
    assert is_row(layout.words)
