"""Batches of BERT and T5 held to what Megatron-LM fed its models, from the flags of its runs: first run, and resumed one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain.config import parse, resolve
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.masked_dataset import array_shapes
from megatrain.data.samples.sampler import DataShard, SingleSampler
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts

WITHOUT_MODEL = ("--spec", "--transformer-impl")


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
        shapes=array_shapes(family, config.data.seq_length, config.model.decoder_seq_length or 0),
    )
    return loader, plan.derived.num_microbatches, config.training.global_batch_size


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_batches_equal_the_recorded_ones(families: Path, family: str, num_workers: int) -> None:
    for case in recorded_cases(families, family):
        loader, count, global_batch = batches_of(
            flags_of(families, family, case), family, num_workers=num_workers
        )
        with loader:
            for first, name in ((0, f"{case}.batches"), (8, f"{case}.resumed.batches")):
                recorded = load_file(families / family / f"{name}.safetensors")
                steps = len(recorded["labels"]) // count
                found = [
                    batch
                    for step in range(first, first + steps)
                    for batch in loader.microbatches(step * global_batch, count)
                ]
                assert set(found[0].arrays) == set(recorded)
                for field, values in recorded.items():
                    stacked = torch.stack([batch.arrays[field] for batch in found])
                    assert torch.equal(stacked, values.to(stacked.dtype)), (case, field)
                inputs = "text" if family == "bert" else "text_dec"
                for field in ("labels", "loss_mask"):
                    assert all(torch.equal(getattr(batch, field), batch.arrays[field]) for batch in found)
                assert all(torch.equal(batch.tokens, batch.arrays[inputs]) for batch in found)
