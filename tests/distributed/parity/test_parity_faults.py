"""Parity finds each planted fault, in a layout that passes without it.

pytest --nightly tests/distributed/parity/test_parity_faults.py      plants all of them
"""

import pytest
from everyday import one_in, only
from parity_faults import FAULTS, measured_with

from megatrain.tools.parity.cli import Comparer
from megatrain.tools.parity.low_precision import LowPrecisionComparer, within
from megatrain.tools.parity.measure import Precision
from megatrain.tools.parity.rows import Layout
from megatrain.tools.parity.tables import is_row

LAYOUTS_OF_FAULTS = {fault.layout for fault in FAULTS.values()}
EVERYDAY_LAYOUTS = {FAULTS[name].layout for name in list(FAULTS)[::54]}


@pytest.mark.parametrize("text", only(EVERYDAY_LAYOUTS, sorted(LAYOUTS_OF_FAULTS)))
def test_a_layout_for_faults_passes_without_them(comparer: Comparer, text: str) -> None:
    verdict = comparer.compare(Layout.of(text))
    assert verdict.is_good, verdict


@pytest.mark.parametrize("fault", one_in(18, FAULTS))
def test_a_planted_fault_is_found(comparer: Comparer, fault: str) -> None:
    assert not comparer.compare(Layout.of(FAULTS[fault].layout), run=measured_with(fault)).is_good


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_a_layout_of_several_ranks(fault: str) -> None:
    layout = Layout.of(FAULTS[fault].layout)
    assert layout.world_size > 1
    assert is_row(layout.words)


@pytest.mark.nightly  # the ordinary run finds them in fp64
@pytest.mark.parametrize(
    "fault",
    [
        "wrong scale",
        "stale gather",
        "gradient reduction of one bucket skipped",
        "weights of one layer used before their all-gather",
    ],
)
@pytest.mark.parametrize(("precision", "formats"), [("bf16", "sumsbf16 momentsbf16"), ("fp16", "")])
def test_a_planted_fault_exceeds_rounding_in_other_formats(
    low_precision: dict[Precision, LowPrecisionComparer], precision: Precision, formats: str, fault: str
) -> None:
    layout = Layout.of(FAULTS[fault].layout).but(formats)
    assert not low_precision[precision].compare(layout, run=measured_with(fault)).is_good


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    [
        "dropped all-reduce",
        "missing gradient sum of a norm under sp",
        "gradient reduction of one bucket skipped",
        "stale gather",
        "wrong tied embedding",
    ],
)
def test_a_planted_fault_exceeds_rounding(
    low_precision: dict[Precision, LowPrecisionComparer], fault: str
) -> None:
    assert (
        not low_precision["bf16"].compare(Layout.of(FAULTS[fault].layout), run=measured_with(fault)).is_good
    )


@pytest.mark.parametrize("experts", ["", pytest.param(" mixtral ep2 alltoall", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_the_order_comparison_finds_a_fault_that_the_exact_one_misses(
    low_precision: dict[Precision, LowPrecisionComparer], experts: str
) -> None:
    """One layer's gradient is too large by 1/1000 on one of two replicas, which is less than the rounding of bf16."""
    fault = "gradients a little too large"
    verdict = low_precision["bf16"].compare(
        Layout.of(FAULTS[fault].layout + experts), run=measured_with(fault)
    )
    assert within(verdict.exact.numbers, verdict.exact_noise)
    assert not verdict.is_good
