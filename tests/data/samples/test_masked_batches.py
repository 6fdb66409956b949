"""Batches of BERT and T5 held to what Megatron-LM fed its models, from the flags of its runs: first run, and resumed one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatrain.config import parse, resolve
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import DataShard, SingleSampler
from megatrain.parallel.batch import Batch
from megatrain.parallel.family_batch import family_batch
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts


def flags_of(families: Path, family: str, case: str) -> list[str]:
    """Return the command line of a recorded run."""
    flags: list[str] = json.loads((families / family / "flags.json").read_text())[case]
    return [word.replace("{sentences}", str(families / "sentences")) for word in flags]


def recorded_cases(families: Path, family: str) -> list[str]:
    return list(json.loads((families / family / "flags.json").read_text()))


def batches_of(flags: list[str], family: str, *, num_workers: int) -> Any:
    """Return a loader over the training samples of a run of one rank, and the micro-batches of a step."""
    request = parse([*flags, "--model-family", family])
    facts = gather_data_facts(request, world_size=1, log=print)
    plan = resolve(request, facts)
    samples = build_samples(plan, facts).train
    assert samples is not None
    config = plan.config
    shard = DataShard(micro_batch_size=config.training.micro_batch_size, dp_rank=0, dp_size=1)
    loader = BatchLoader(
        samples,
        SingleSampler(shard, len(samples)),
        seq_length=config.data.seq_length,
        num_workers=num_workers,
        family=family,
        decoder_seq_length=config.model.decoder_seq_length,
    )
    return samples, loader, plan.derived.num_microbatches, config.training.global_batch_size


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_batches_equal_the_recorded_ones(families: Path, family: str, num_workers: int) -> None:
    for case in recorded_cases(families, family):
        samples, loader, count, global_batch = batches_of(
            flags_of(families, family, case), family, num_workers=num_workers
        )
        with closing(loader):
            for first, name in ((0, f"{case}.batches"), (8, f"{case}.resumed.batches")):
                recorded = load_file(families / family / f"{name}.safetensors")
                steps = len(recorded["labels"]) // count
                found = [
                    batch
                    for step in range(first, first + steps)
                    for batch in loader.microbatches(step * global_batch, count)
                ]
                assert len(found) == len(recorded["labels"])
                for number, batch in enumerate(found):
                    arrays = {field: values[number] for field, values in recorded.items()}
                    assert_equal(batch, family_batch(family, arrays))
                    start = first * global_batch + number * len(arrays["labels"])
                    for row in range(len(arrays["labels"])):
                        read = samples[start + row].arrays
                        assert set(read) == set(arrays)
                        for field, values in arrays.items():
                            assert np.array_equal(read[field], values[row].numpy()), (case, field)


def assert_equal(batch: Batch, expected: Batch) -> None:
    """Compare all tensors of two batches."""
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    batch.mapped(lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    expected.mapped(lambda x: wanted.append(x) or x)  # type: ignore[func-returns-value]
    assert len(found) == len(wanted) > 5
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
