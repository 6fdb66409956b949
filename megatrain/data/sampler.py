"""Which data-parallel rank reads which samples.

    single:  consumed -> | rank 0: m | rank 1: m | .. | rank d-1: m | rank 0: m | ..     (m = micro-batch size)
                         `------------- micro-batch 0 ------------' `- micro-batch 1 ..

Pure functions of the consumed samples: resuming needs one integer. Tensor, pipeline and context ranks of a replica
read the same samples.

Source: Megatron-LM, training/datasets/data_samplers.py; rules in tests/golden.
"""

from __future__ import annotations


def single(
    consumed_samples: int,
    microbatch: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    total_samples: int,
    drop_last: bool = True,
) -> range:
    """Sample numbers of micro-batch `microbatch` of the step that starts behind `consumed_samples`.

    Samples are taken in order and never twice. What is left at the end and does not fill a micro-batch on all ranks is
    dropped, or, without `drop_last`, handed out the same way: some ranks get fewer or none.
    """
    group_start = consumed_samples + microbatch * micro_batch_size * dp_size
    if drop_last and group_start + micro_batch_size * dp_size > total_samples:
        return range(0)
    start = group_start + dp_rank * micro_batch_size
    return range(min(start, total_samples), min(start + micro_batch_size, total_samples))
