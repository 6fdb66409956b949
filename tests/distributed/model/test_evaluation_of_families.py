"""Evaluation of BERT and T5: losses and accuracies are those of a plain computation, and the same under every layout."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from everyday import nightly
from torch import Tensor
from torch.nn import functional as F

from megatrain.model.families.accuracy import vocab_parallel_argmax
from megatrain.model.families.cross_attention import split_memory
from megatrain.model.head import Head
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.tensor_parallel import VocabShard
from megatrain.tools.parity.measure import chunked_loss, engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import MICRO_BATCH, Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.engine import Engine
from megatrain.training.evaluation import evaluate
from megatrain.training.losses import evaluation_sums, quotients

Values = dict[str, float]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        nightly("tp2 pp2 bert", {"loss", "token_accuracy", "sop_loss", "sop_accuracy"}),
        nightly("tp2 sp dp2 pp2 bert", {"loss", "token_accuracy", "sop_loss", "sop_accuracy"}),
        ("tp2 sp cp2 bert", {"loss", "token_accuracy", "sop_loss", "sop_accuracy"}),
        nightly("tp2 pp2 mlm", {"loss", "token_accuracy"}),
        ("tp2 sp dp2 pp2 t5", {"loss", "token_accuracy"}),
    ],
)
def test_values_are_those_of_a_plain_computation(pool: WorkerPool, text: str, names: set[str]) -> None:
    layout = Layout.of(text)
    ((ids, plain),) = pool.run(1, plain_values, layout.alone)
    assert plain.keys() == names
    assert all(0.2 < value < 0.8 for name, value in plain.items() if name == "token_accuracy")
    found = [*pool.run(1, evaluated, layout.alone, ids), *pool.run(layout.world_size, evaluated, layout, ids)]
    assert found == [pytest.approx(plain, rel=1e-10)] * (1 + layout.world_size)


def batches_of(layout: Layout, dp_rank: int, ids: list[Tensor]) -> list[Batch]:
    """Return this replica's micro-batches; every other label that counts is of `ids`, by micro-batch of all replicas."""
    batches = list(local_batches(0, layout, dp_rank))
    labels = [ids[number * layout.dp + dp_rank] for number in range(len(batches))] if ids else []
    for batch, predicted in zip(batches, labels, strict=False):
        counts = batch.loss_mask > 0
        every_other = counts & (counts.cumsum(1) % 2 == 1)
        batch.labels[every_other] = predicted[every_other]
    return batches


def evaluated(rank: int, world_size: int, layout: Layout, ids: list[Tensor]) -> Values:
    """Return the values of an evaluation in chunks of a few tokens, with a micro-batch of padding on each replica."""
    engine = engine_of(tiny_plan(layout, world_size), rank)
    batches = batches_of(layout, engine.grid.dp.rank, ids)
    padding = replace(
        batches[0], loss_mask=torch.zeros_like(batches[0].loss_mask), denominator=torch.tensor(0.0)
    )
    with chunked_loss():
        sums = evaluate(engine, [*batches, padding], [MICRO_BATCH] * len(batches) + [0])
    return dict(zip(evaluation_sums(engine.model.spec.head), quotients(sums).tolist(), strict=True))


def plain_values(rank: int, world_size: int, layout: Layout) -> tuple[list[Tensor], Values]:
    """Return the ids that one process predicts, by micro-batch, and the values with them among the labels."""
    engine = engine_of(tiny_plan(layout, world_size), rank)
    ids = [logits.argmax(-1) for logits, _ in logits_of(engine, batches_of(layout, 0, []))]
    batches = batches_of(layout, 0, ids)
    losses, hits, sop_losses, sop_hits = [], [], [], []
    for batch, (logits, classes) in zip(batches, logits_of(engine, batches), strict=True):
        counted = batch.loss_mask > 0
        losses.append(F.cross_entropy(logits[counted], batch.labels[counted], reduction="none"))
        hits.append((logits.argmax(-1) == batch.labels)[counted].double())
        if classes is not None:
            assert batch.are_swapped is not None
            sop_losses.append(F.cross_entropy(classes, batch.are_swapped))
            sop_hits.append((classes.argmax(-1) == batch.are_swapped).double())
    is_bert = layout.family == "bert"
    values = {"loss": torch.stack([one.mean() for one in losses]) if is_bert else torch.cat(losses)}
    if sop_losses:
        values |= {"sop_loss": torch.stack(sop_losses), "sop_accuracy": torch.cat(sop_hits)}
    values["token_accuracy"] = torch.cat(hits)
    return ids, {name: value.mean().item() for name, value in values.items()}


def logits_of(engine: Engine, batches: list[Batch]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the logits [b, s, v] and the logits of the two classes [b, 2] of each micro-batch."""
    found = []
    forward = Head.forward

    def noting(head: Any, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        x = split_memory(hidden, batch, head.tp)[0] if head.has_memory else hidden
        assert head.norm is not None
        x = head.norm(x, info)
        rows = x if head.transform is None else head.transform(x, info)
        logits = rows @ head._output().weight.t() + getattr(head, "bias", 0.0)
        binary, classes = head.binary, None
        if binary is not None:
            pooled = torch.tanh(x[0] @ binary.pooler_weight.t() + binary.pooler_bias)
            classes = pooled @ binary.binary_head_weight.t() + binary.binary_head_bias
        found.append((logits.transpose(0, 1)[..., : head.vocab_size], classes))
        loss: Tensor = forward(head, hidden, batch, info)
        return loss

    with mock.patch.object(Head, "forward", noting):
        evaluate(engine, batches)
    return found


def test_the_lowest_of_equal_ids_is_the_largest(pool: WorkerPool) -> None:
    assert all(pool.run(4, lowest_ids))


def lowest_ids(rank: int, world_size: int) -> bool:
    """Compare with one process; the last rank holds padding alone, whose logits are the largest."""
    group = RankGroup("world", tuple(range(world_size)), rank, make_group("world", []))
    logits = torch.randint(-3, 0, (200, 20), generator=torch.Generator().manual_seed(0)).double()
    logits[:, 14:] = 9
    own = logits[:, 5 * rank : 5 * rank + 5].contiguous()
    found = vocab_parallel_argmax(own, VocabShard(group, 5, 14))
    expected = [row.index(max(row)) for row in logits[:, :14].tolist()]
    return found.tolist() == expected
