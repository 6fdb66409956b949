"""Activations in host memory change no bit, under every schedule, with recomputation and in FP8."""

from __future__ import annotations

import numpy as np
import pytest
from everyday import only
from test_data_parallel import trained

from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool

LAYOUTS = [
    "pp2 zbv offloadmodules recomputenorms",
    "pp2 zbv dp2 zero3 overlap batch16 offloadmodules recomputenorms",
    "pp2 1f1b dp2 zero2 batch16 offloadlayers",
    "pp2 interleaved batch16 offloadlayers",
    "pp2 zbh1 batch16 offloadlayers tied",
    "pp2 dualpipev batch16 offloadmodules",
    "tp2 sp tpoverlap offloadmodules recomputenorms",
    "tp2 sp cp2 heads offloadlayers mtp2",
    "cp2 documents offloadmodules",
    "dp2 zero1 overlap deepseek ep2 alltoall offloadmodules",
    "dp2 zero2 overlap mixtral ep2 moeoverlap offloadlayers",
    "dp2 pp2 dualpipev zero1 overlap mixtral ep2 alltoall batch16 moeoverlap offloadlayers",
    "pp2 interleaved uniform batch16 offloadinputs",
    "pp2 mtp2 block offloadlayers",
    "tp2 mla recomputelatents offloadmodules",
    "dp2 zero3 fp8tensorwise offloadlayers",
    "tp2 sp fp8blockwise offloadmodules",
]


@pytest.mark.parametrize("words", only(LAYOUTS[:1], LAYOUTS))
def test_offloading_changes_no_bit(pool: WorkerPool, words: str) -> None:
    layout = Layout.of(words)
    found = pool.run(layout.world_size, trained, layout, ())
    expected = pool.run(layout.world_size, trained, layout.but("keepactivations"), ())
    for (numbers, state), (others, other_state) in zip(found, expected, strict=True):
        assert numbers == others
        assert all(np.array_equal(a, b) for a, b in zip(state, other_state, strict=True))
