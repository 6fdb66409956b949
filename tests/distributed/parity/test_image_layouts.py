"""Images that ranks share, packed and in tiles, give the results of one process."""

import pytest

from megatrain.tools.parity.cli import Comparer
from megatrain.tools.parity.rows import Layout

LARGEST = 1e-12


@pytest.mark.parametrize(
    "text",
    [
        "tp2 sp cp2 pp2 tiles",
        "pp4 balanced vlm",
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in ("tp3 tiles", "tp2 sp cp4 tiles", "cp4 vlm", "tp2 sp cp2 llava", "tp2 sp dp2 zero3 tiles", "tp2 sp pp4 balanced tiles", "cp2 pp2 interleaved balanced vlm", "pp2 zbv balanced vlm")
        ),
    ],
)  # fmt: skip
@pytest.mark.nightly
def test_shared_images_give_the_results_of_one_process(comparer: Comparer, text: str) -> None:
    verdict = comparer.compare(Layout.of(text))
    assert verdict.is_good, verdict
    assert max(verdict.numbers) < LARGEST, verdict
