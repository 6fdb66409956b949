"""`megatrain cache-logits`: the outputs of a teacher for the samples of a run, from which runs train without it.

    flags of the run, --export-kd-teacher-load ─> samples 0, 1, 2 ... ─> the teacher's k most likely tokens ─> shards, manifest

Replicas write a shard each in turn; tensor ranks share the teacher. A command that was stopped continues with the next shard.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.config import parse
from megatrain.config.errors import ConfigError
from megatrain.config.subjects.post_training.distillation import samples_digest
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import DataShard, SingleSampler
from megatrain.data.teacher_logits import (
    MANIFEST_NAME,
    VERSION,
    LogitsManifest,
    TopTokens,
    hash_weights,
    read_logits_manifest,
    samples_per_shard,
    write_shard,
)
from megatrain.kernels.dtypes import accumulation_dtype
from megatrain.model.layer_context import ExpertCommunication
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.collectives import all_gather, all_reduce
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import VocabShard
from megatrain.tools.subcommands import add_command
from megatrain.training.batches import build_samples
from megatrain.training.distillation.teacher import RunTeacher, build_distillation, with_whole_weights
from megatrain.training.launch.ranks import Ranks, joined_ranks

_ROWS = 2048
"""Tokens whose logits are computed together."""


def add_flags(commands: Any) -> None:
    """Add the subcommand."""
    command = add_command(
        commands,
        "cache-logits",
        run,
        takes_run_flags=True,
        usage="megatrain cache-logits [--logits-save-dir DIR] [--logits-save-top-k K] FLAGS",
    )
    command.add("--logits-save-dir DIR", "folder (default: PREFIX.logits, of the first --data-path)", of=Path)
    command.add("--logits-save-top-k K", "tokens kept", 64, at_least=1)
    command.add("--logits-save-dtype", "of log-probabilities", "fp16", choices=("fp16", "fp32"))


def run(arguments: argparse.Namespace) -> None:
    """Write the most likely tokens of --export-kd-teacher-load for each token that a run trains on."""
    with joined_ranks(parse(arguments.run_flags)) as ranks:
        write_cache(
            ranks, arguments.logits_save_dir, arguments.logits_save_top_k, arguments.logits_save_dtype
        )


def write_cache(ranks: Ranks, folder: Path | None, top_k: int, dtype: str) -> None:
    """Write the outputs of the run's teacher; all ranks call it."""
    plan, grid = ranks.plan, ranks.grid
    spec, config = plan.derived.distillation, plan.config
    if spec is None or spec.teacher is None:
        raise ConfigError("there is no teacher whose outputs are written", fix="add --export-kd-teacher-load")
    if grid.pp.size * grid.cp.size > 1:
        raise ConfigError(
            "a teacher's outputs are not written under pipeline and context parallelism",
            fix="remove --pipeline-model-parallel-size and --context-parallel-size: the runs that read them may have both",
        )
    folder = _folder(folder, ranks)
    manifest = _manifest(ranks, min(top_k, plan.derived.vocab_size), dtype)
    _begin(ranks, folder, manifest)
    # Replicas compute different numbers of samples: no weights are gathered over them.
    whole = with_whole_weights(grid)
    distillation = build_distillation(plan, whole, ranks.device, ExpertCommunication())
    assert distillation is not None
    teacher = distillation.teacher
    assert isinstance(teacher, RunTeacher)
    teacher.load(vocab_size=plan.derived.vocab_size, allows_format_torch=config.checkpoint.allow_pickle)
    samples = build_samples(plan, ranks.facts, ranks.console.print).train
    assert samples is not None
    shard = DataShard(micro_batch_size=config.training.micro_batch_size, dp_rank=0, dp_size=1)
    loader = BatchLoader(
        samples,
        SingleSampler(shard, len(samples)),
        seq_length=config.data.seq_length,
        device=ranks.device,
        num_workers=0,
        has_documents=config.data.has_documents,
    )
    for number in range(grid.dp.rank, manifest.num_shards, grid.dp.size):
        path = manifest.shard_path(folder, number)
        size = len(manifest.samples_of(number)) * manifest.record_type.itemsize
        if path.is_file() and path.stat().st_size == size:
            continue
        parts = list(
            _outputs(teacher, loader, manifest.samples_of(number), manifest.top_k, shard.micro_batch_size)
        )
        if grid.tp.is_first:
            write_shard(path, manifest, parts)
        ranks.console.print(f"> wrote {path}, of {manifest.num_shards} shards")
    grid.messages.gather(None)
    if ranks.is_main:
        dataclasses.replace(manifest, is_complete=True).write(folder)
    grid.messages.broadcast(None)
    ranks.console.print(f"> {folder} has the outputs of {spec.path} for {manifest.num_samples} samples")


def _folder(folder: Path | None, ranks: Ranks) -> Path:
    datasets = ranks.facts.datasets
    if folder is None and not datasets:
        raise ConfigError("the data has no prefix for the outputs", fix="add --logits-save-dir")
    return folder or Path(f"{datasets[0].prefix}.logits")


def _manifest(ranks: Ranks, top_k: int, dtype: str) -> LogitsManifest:
    plan, facts = ranks.plan, ranks.facts
    assert facts.teacher is not None
    manifest = LogitsManifest(
        version=VERSION,
        seq_length=plan.config.data.seq_length,
        top_k=top_k,
        dtype=dtype,
        vocab_size=plan.derived.vocab_size,
        num_samples=plan.derived.train_samples,
        samples_per_shard=1,
        data_digest=samples_digest(plan.config, plan.derived, facts),
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        teacher=facts.teacher.path,
        teacher_checksum=facts.teacher.checksum,
        is_complete=False,
    )
    count = samples_per_shard(manifest.record_type.itemsize, plan.config.training.micro_batch_size)
    return dataclasses.replace(manifest, samples_per_shard=count)


def _begin(ranks: Ranks, folder: Path, manifest: LogitsManifest) -> None:
    """Write the manifest, or compare it with that of a command that was stopped. Raises ConfigError on all ranks."""
    problem = None
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        stored = (
            read_logits_manifest(folder, is_complete=False) if (folder / MANIFEST_NAME).exists() else None
        )
        if stored is not None and dataclasses.replace(stored, is_complete=False) != manifest:
            problem = f"{folder} has the outputs of another teacher, or for other samples"
        elif stored is None:
            manifest.write(folder)
    problem = ranks.grid.messages.broadcast(problem)
    if problem is not None:
        fix = "name another folder with --logits-save-dir, or remove it"
        raise ConfigError(problem, fix=fix, is_reported=not ranks.is_main)


def _outputs(
    teacher: RunTeacher, loader: BatchLoader, samples: range, top_k: int, size: int
) -> Iterator[TopTokens]:
    """Yield the outputs of a shard's samples, a micro-batch at a time."""
    for first in range(samples.start, samples.stop, size):
        (batch,) = loader.microbatches(first, 1)
        ids, values, rest = _top(teacher, batch, top_k)
        b, s = batch.tokens.shape
        hashes = (batch.tokens.cpu().numpy() * hash_weights(s)).sum(1)
        arrays = [x.unflatten(0, (s, b)).transpose(0, 1).cpu().numpy() for x in (ids, values, rest)]
        yield TopTokens(arrays[0].astype(np.int32), arrays[1], arrays[2].astype(np.float32), hashes)


@torch.no_grad()
def _top(teacher: RunTeacher, batch: Batch, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [t, k], log-probabilities [t, k] and the log of the rest's probability [t], tokens in order [s, b]."""
    info = PassInfo(documents=batch.documents)
    head, group = teacher.head, teacher.model.tp.group
    x = head.rows(teacher.outputs(batch, info).normed, info)
    found = [_top_of(head.chunk_logits(rows), head.vocab, top_k, group) for rows in x.split(_ROWS)]
    ids, values, rest = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ids, values, rest


def _top_of(logits: Tensor, vocab: VocabShard, top_k: int, group: RankGroup) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.to(accumulation_dtype(logits.dtype), copy=True)
    logits[:, vocab.num_real :] = -torch.inf
    largest = all_reduce(logits.amax(1).clamp(min=torch.finfo(logits.dtype).min), group, "max")
    log_sums = all_reduce((logits - largest[:, None]).exp().sum(1), group).log() + largest
    values, columns = (logits - log_sums[:, None]).topk(min(top_k, logits.shape[1]), dim=1)
    ids = columns + vocab.first
    if group.size > 1:
        values, ids = (
            all_gather(x.contiguous(), group).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1)
            for x in (values, ids)
        )
        values, order = values.topk(top_k, dim=1)
        ids = ids.gather(1, order)
    rest = (1 - values.exp().sum(1)).clamp(min=0).log()
    return ids, values, rest
