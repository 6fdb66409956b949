"""A schedule of packs against one rank on the same documents: losses, gradients and weights of two steps and an evaluation, in fp64.

Documents of every length up to four times what a rank holds, so that groups of one, two and four ranks work side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from everyday import nightly
from torch import Tensor

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.facts import DatasetFacts
from megatrain.data.indexed.reader import loss_mask_of
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.pack_loader import PackLoader
from megatrain.model.contexts import PackRotary
from megatrain.model.experts.pack_router import PackRouter
from megatrain.parallel.documents import Documents
from megatrain.parallel.packs.context import PackBatch
from megatrain.parallel.packs.schedule import Pack, PackCosts
from megatrain.tools.parity.compare import Distance, judge
from megatrain.tools.parity.measure import Measured, _losses_of, _noted_gradients, engine_of, weights_of
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training import engine as engine_file
from megatrain.training.batches import build_samples
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.evaluation import evaluate
from megatrain.training.planning.packs import pack_settings

STEPS, BATCH = 2, 24
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8 --vocab-size 101 --seq-length 64"
    " --init-method-std 0.1 --mock-data --tokenizer-type NullTokenizer --pack-documents --calculate-per-token-loss"
    f" --micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-2 --adam-eps 1e-6 --device cpu"
    " --params-dtype float64 --attention-dropout 0 --eval-iters 0 --make-vocab-size-divisible-by 8"
)
LENGTHS = (
    '{"type": "lognormal", "min_seq_len": 3, "max_seq_len": 65, "mean_seq_len": 20, "lognormal_sigma": 1.2}'
)
ROPE = "--position-embedding-type rope --hidden-dropout 0.2"
LEARNED = "--position-embedding-type learned_absolute --max-position-embeddings 64 --hidden-dropout 0"
DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 16"
EXPERTS = (
    f"{ROPE} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-z-loss-coeff 0.02 --moe-router-load-balancing-type seq_aux_loss"
    " --moe-aux-loss-coeff 0.05 --moe-input-jitter-eps 0.1"
)
BLOCKS = f"{ROPE} --disable-bias-linear --fp8-format e4m3 --fp8-recipe blockwise --fp8-block-size 16 --no-fp8-wgrad"
"""Scales of rows, which do not depend on the pack; those of weight gradients are of columns."""
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STAGES = "--pipeline-model-parallel-size 2"
GROUPS = "--group-query-attention --num-query-groups 2"


def facts_of(words: list[str], world_size: int = 1) -> Facts:
    files = [words[place + 1] for place, word in enumerate(words) if word == "--data-path"]
    datasets = tuple(
        DatasetFacts(split="all", prefix=file, weight=None, num_sequences=80, num_tokens=2000, digest="")
        for file in files
    )
    return Facts(world_size=world_size, vocab_size=101, eod_id=100, device="cpu", datasets=datasets)


def plan_of(flags: str, world_size: int) -> Plan:
    words = [*MODEL.split(), "--varlen-mock-dataset-config-json", LENGTHS, *flags.split()]
    return resolve(parse(words), facts_of(words, world_size))


def loader_of(plan: Plan, rank: int, facts: Facts | None = None) -> PackLoader:
    """Return a loader whose schedules balance tokens, and avoid large groups: in a model as small as this, the number of packs decides the time."""
    samples = build_samples(plan, facts or facts_of([]), lambda _: None).train
    assert samples is not None
    settings = replace(pack_settings(plan), costs=PackCosts(pair=0.01, sent=0.3))
    return PackLoader(samples, len(samples), settings, rank=rank, device=torch.device("cpu"), num_workers=1)


def measure(rank: int, world_size: int, flags: str, fault: str) -> Measured:
    """Run two steps on one rank."""
    plan = plan_of(flags, world_size)
    with FAULTS[fault]():
        engine = engine_of(plan, rank)
        loader = loader_of(plan, engine.grid.replicas.rank, facts_of(flags.split()))
        gradients, hyperparams = _noted_gradients(engine), build_schedules(plan).at(0)
        count = BATCH // loader._settings.documents_per_pass
        reports = [
            engine.step(loader.microbatches(step * BATCH, count), hyperparams, first_sample=step * BATCH)
            for step in range(STEPS)
        ]
        sums = evaluate(engine, loader.microbatches(0, count))
        loader.close()
        weights = weights_of(engine)
    losses = [float(sums[0] / sums[1]), *(loss for report in reports for loss in _losses_of(report))]
    return Measured(losses, [report.grad_norm for report in reports], gradients, weights)


def _a_sample_twice() -> AbstractContextManager[Any]:
    read = PackLoader._batch

    def twice(self: PackLoader, pack: Pack, *rest: Any) -> PackBatch:
        documents = (pack.documents[0], *pack.documents[:-1]) if len(pack.documents) > 1 else pack.documents
        return read(self, replace(pack, documents=documents, num_tokens=64 * len(documents)), *rest)

    return mock.patch.object(PackLoader, "_batch", twice)


def _a_sample_lost() -> AbstractContextManager[Any]:
    read = PackLoader._batch
    return mock.patch.object(
        PackLoader,
        "_batch",
        lambda self, pack, *rest: read(self, replace(pack, documents=pack.documents[1:]), *rest),
    )


def _weighted_by_its_microbatches() -> AbstractContextManager[Any]:
    scales = Engine._loss_scales

    def weighted(self: Engine, batches: Any) -> Any:
        return [(one * len(batches) / 3, other) for one, other in scales(self, batches)]

    return mock.patch.object(engine_file.Engine, "_loss_scales", weighted)


def _positions_of_the_pack() -> AbstractContextManager[Any]:
    read = PackLoader._batch

    def counted_on(self: PackLoader, *arguments: Any) -> PackBatch:
        batch = read(self, *arguments)
        positions = torch.arange(batch.tokens.shape[1])[None] % 64
        return replace(batch, position_ids=positions, denominator=batch.loss_denominator)

    return mock.patch.object(PackLoader, "_batch", counted_on)


def _documents_see_others() -> AbstractContextManager[Any]:
    def whole(self: PackLoader, starts: Any, length: int) -> Documents:
        return Documents(torch.tensor([0, length], dtype=torch.int32), length, 1, length)

    return mock.patch.object(PackLoader, "_documents", whole)


def _fillers_are_routed() -> AbstractContextManager[Any]:
    return mock.patch.object(PackRouter, "_num_own", lambda _self, rows: rows)


def _rope_of_the_first_pack() -> AbstractContextManager[Any]:
    of_pack = PackRotary.rows

    def of_first(self: PackRotary, count: int) -> tuple[Tensor, ...]:
        first = vars(self).setdefault("first", of_pack(self, count))
        return tuple(torch.cat([table] * (count // len(table) + 1))[:count] for table in first)

    return mock.patch.object(PackRotary, "rows", of_first)


def _dropout_of_places() -> AbstractContextManager[Any]:
    read = PackLoader._batch

    def by_place(self: PackLoader, *arguments: Any) -> PackBatch:
        batch = read(self, *arguments)
        ids = torch.arange(batch.tokens.shape[1])[None]
        return replace(batch, token_ids=ids, denominator=batch.loss_denominator)

    return mock.patch.object(PackLoader, "_batch", by_place)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "a sample twice": _a_sample_twice,
    "a sample lost": _a_sample_lost,
    "a loss weighted by the micro-batches of its group": _weighted_by_its_microbatches,
    "positions not restarted": _positions_of_the_pack,
    "documents see other documents": _documents_see_others,
    "RoPE of the first pack": _rope_of_the_first_pack,
    "tokens that fill packs up are routed": _fillers_are_routed,
    "dropout keyed by places in a pack": _dropout_of_places,
}


@pytest.fixture(scope="module")
def distance(pool: WorkerPool) -> Callable[..., Distance]:
    """Return the distance of a layout's answers from those of one rank."""
    known: dict[str, Measured] = {}

    def compare(model: str, layout: str, world_size: int, fault: str = "") -> Distance:
        if model not in known:
            (known[model],) = pool.run(1, measure, model, "")
        return judge(known[model], pool.run(world_size, measure, f"{model} {layout}", fault))

    return compare


@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [
        (ROPE, DYNAMIC, 4),
        (EXPERTS, f"{DYNAMIC} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall", 4),
        nightly(EXPERTS, f"{DYNAMIC} {STAGES} --expert-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params", 8),
        nightly(f"{LEARNED} {GROUPS}", f"{DYNAMIC} --cp-comm-type all_gather --data-parallel-sharding-strategy optim_grads_params", 4),
        nightly(EXPERTS, "--dynamic-context-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        nightly(BLOCKS, f"{DYNAMIC} {STAGES} --context-parallel-size 2", 8),
        nightly(ROPE, f"{DYNAMIC} {STAGES} {RECOMPUTED}", 8),
        nightly(ROPE, f"--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel {STAGES}", 8),
        nightly(ROPE, "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 16 --tensor-model-parallel-size 2 --sequence-parallel", 8),
        nightly(ROPE, f"{DYNAMIC} --context-parallel-size 2 --min-dynamic-context-parallel-size 2", 4),
        nightly(ROPE, "--context-parallel-size 2 --sequence-packing-scheduler first_fit", 4),
        nightly(ROPE, "--context-parallel-size 2 --data-parallel-sharding-strategy optim_grads", 4),
        (f"{ROPE} --softmax-type learnable", f"{DYNAMIC} --cp-comm-type all_gather", 4),
        nightly(f"{ROPE} --window-size 8,0", f"{DYNAMIC} --data-parallel-sharding-strategy no_shard", 4),
        nightly(ROPE, f"{DYNAMIC} {RECOMPUTED} --mlp-chunks-for-training 3", 4),
        nightly(ROPE, "--dynamic-context-parallel --tensor-model-parallel-size 2 --sequence-parallel --data-parallel-sharding-strategy optim_grads_params", 8),
    ],
)  # fmt: skip
def test_packs_on_any_groups_equal_one_rank(
    distance: Callable[..., Distance], model: str, layout: str, world_size: int
) -> None:
    found = distance(model, layout, world_size)
    assert found.is_good, found


@pytest.mark.nightly
def test_packs_of_conversations_equal_one_rank(distance: Callable[..., Distance], tmp_path: Path) -> None:
    """Prompts have no loss, so that packs differ in the share of their tokens that count."""
    random, prefix = np.random.default_rng(0), str(tmp_path / "talk")
    lengths = random.integers(4, 65, 80)
    for path, dtype, most in ((prefix, "uint16", 99), (loss_mask_of(prefix), "uint8", 2)):
        with IndexedWriter(path, dtype) as writer:
            for length in lengths.tolist():
                writer.add_document([random.integers(0, most, length).tolist()])
    found = distance(
        f"{ROPE} --no-mock-data --sft --split 1,0,0 --data-path {prefix}",
        f"{DYNAMIC} {STAGES} --context-parallel-size 2",
        8,
    )
    assert found.is_good, found


@pytest.mark.parametrize(
    "fault",
    ["a loss weighted by the micro-batches of its group", *(nightly(name) for name in FAULTS if name)],
)
def test_a_planted_fault_is_found(distance: Callable[..., Distance], fault: str) -> None:
    models = {"RoPE": ROPE, "dropout": ROPE, "routed": EXPERTS}
    model = next((one for word, one in models.items() if word in fault), f"{LEARNED} {GROUPS}")
    assert not distance(model, DYNAMIC, 4, fault).is_good


def test_groups_of_all_sizes_work_in_these_steps() -> None:
    plan = plan_of(f"{ROPE} {DYNAMIC}", 4)
    loader = loader_of(plan, 0)
    _, found = loader.schedule(0, BATCH)
    assert {pack.size for pack in found} == {1, 2, 4}
    counts = [sum(rank in pack.ranks for pack in found) for rank in range(4)]
    assert len(set(counts)) > 1, counts
    assert np.mean([len(pack.documents) for pack in found]) > 1
