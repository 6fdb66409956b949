"""The batches of a run on one rank: from the plan to a loader for each split.

    rank 0 builds the samples, and leaves large indices in the cache ──> one rank a host ──> all others
    samples + order ──> BatchLoader; ranks in the middle of a pipeline read nothing

Only the first and the last pipeline stage need tokens; those between need no more than where documents end, if that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatrain.config import Facts, Plan
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.data.samples.build import BuiltIndex, Plans, SplitBuilder, Splits
from megatrain.data.samples.dataset import Samples
from megatrain.data.samples.gpt import SampleRules, effective_pad
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import CyclicOrder, Order, Share, SingleOrder, WholeOrder
from megatrain.data.samples.sources import blends_of
from megatrain.parallel.batch import Batch
from megatrain.training.launch.ranks import Ranks


class Batches(Protocol):
    """Where the micro-batches of a split come from."""

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """This rank's micro-batches of the step that starts behind `consumed_samples`."""

    def close(self) -> None:
        """End what runs in the background."""


@dataclass(frozen=True)
class EvaluationSet:
    """What a loss is reported of."""

    split: str
    dataset: str | None
    """Its name, where each validation dataset has a loss of its own."""
    batches: Batches
    num_microbatches: int
    """Of each rank, in one evaluation."""
    is_whole: bool
    """Whether each evaluation reads all of it, from the start."""

    @property
    def name(self) -> str:
        """In the log."""
        split = "validation" if self.split == "valid" else self.split
        return split if self.dataset is None else f"{split} {self.dataset}"


@dataclass(frozen=True)
class RunBatches:
    """All that a run reads."""

    train: Batches | None
    evaluations: tuple[EvaluationSet, ...]

    def close(self) -> None:
        """End what runs in the background."""
        for batches in (self.train, *(one.batches for one in self.evaluations)):
            if batches is not None:
                batches.close()


def build_samples(
    plan: Plan,
    facts: Facts,
    say: Callable[[str], None] = print,
    on_built: Callable[[BuiltIndex], None] | None = None,
    *,
    are_facts_from_afar: bool = False,
) -> Splits:
    """The samples that a plan describes.

    Args:
        plan, facts: alike on all ranks.
        say, on_built: as `SplitBuilder` takes them.
        are_facts_from_afar: whether they were gathered on another host, whose files may be others.

    Raises:
        ConfigError: samples are asked for that the data does not hold.
        InputError: the files are not those of the facts.
    """
    data, derived = plan.config.data, plan.derived
    special = {*facts.special_ids, *([] if derived.eod_id is None else [derived.eod_id])}
    rules = SampleRules(
        seq_length=data.seq_length,
        eod=derived.eod_id,
        pad=effective_pad(facts.pad_id, special, allow_ambiguous=data.allow_ambiguous_pad_tokens),
        vocab_size=derived.vocab_size,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        inter_document_masking=data.dataloader_inter_document_masking,
    )
    builder = SplitBuilder(
        rules,
        cache_folder=data.data_cache_path,
        mmap=not data.no_mmap_bin_files,
        surplus=data.mid_level_dataset_surplus,
        digests={one.prefix: one.digest for one in facts.datasets} if are_facts_from_afar else None,
        say=say,
        on_built=on_built,
    )
    plans = Plans(
        train=(0,) if plan.config.training.skip_train else derived.train_plan,
        valid=derived.valid_plan if derived.requested_valid_samples != 0 else (0,),
        test=derived.test_plan if derived.requested_test_samples else (0,),
        seed=plan.config.training.seed,
    )
    splits = builder.build(
        blends_of(facts.datasets), data.split, plans, named_valid=data.multiple_validation_sets
    )
    if data.dataloader_type == "single":
        _require(splits.train, derived.requested_train_samples, "training", "fewer --train-iters")
        _require(splits.valid, derived.requested_valid_samples, "validation", "fewer --eval-iters")
        _require(splits.test, derived.requested_test_samples, "test", "fewer --eval-iters")
    return splits


def _require(samples: Samples | None, wanted: int | None, name: str, fewer: str) -> None:
    if samples is not None and wanted is not None and len(samples) < wanted:
        raise ConfigError(
            f"the {name} data holds {len(samples)} samples, and {wanted} are asked of it: datasets without weights are"
            " read once",
            fix=f"give each dataset a weight, by which it is read as often as it takes, add data, or ask for {fewer}",
        )


def build_batches(ranks: Ranks, plan: Plan, say: Callable[[str], None]) -> RunBatches:
    """This rank's batches. All ranks call it together.

    Raises:
        MegatrainError: on all ranks, where any failed.
    """
    return _Builder(ranks, plan).build(_built_in_turns(ranks, plan, say))


@dataclass(frozen=True)
class _Lengths:
    """How many samples there are of each split, which ranks that read none need to know too."""

    train: int | None
    valid: int | None
    test: int | None
    named_valid: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, splits: Splits) -> _Lengths:
        train, valid, test = (
            None if one is None else len(one) for one in (splits.train, splits.valid, splits.test)
        )
        return cls(train, valid, test, {name: len(one) for name, one in splits.named_valid.items()})


def _built_in_turns(ranks: Ranks, plan: Plan, say: Callable[[str], None]) -> tuple[Splits | None, _Lengths]:
    """The samples, or None on a rank that reads none, and how many there are.

    Rank 0 goes first, then a rank of each host, then all: whoever comes later finds the indices in the cache, on a
    shared disk or on their own.
    """
    reads = ranks.grid.pp.is_first or ranks.grid.pp.is_last or _has_documents(plan)
    takes_turns = plan.config.data.data_cache_path is not None and ranks.grid.world.size > 1
    own_turn = 0 if ranks.is_main or not takes_turns else 1 if ranks.local_rank == 0 else 2
    splits, lengths = None, _Lengths(None, None, None)
    for turn in range(3 if takes_turns else 1):
        failure: Exception | None = None
        if turn == own_turn and reads:
            try:
                splits = build_samples(plan, ranks.facts, say, are_facts_from_afar=not ranks.is_main)
            except Exception as error:  # noqa: BLE001 (whatever happened here, the others wait for an answer)
                failure = error
        answer = {"failed": failure is not None, "lengths": vars(_Lengths.of(splits)) if splits else None}
        found = ranks.grid.messages.concluded(answer, _concluded)
        _raise_together(ranks, failure, found["first_failed"])
        lengths = _Lengths(**found["lengths"])
    return splits, lengths


def _concluded(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks need to know: the first that failed, and rank 0's lengths, as it is on the first stage in any layout."""
    failed = [rank for rank, answer in enumerate(answers) if answer["failed"]]
    return {"first_failed": failed[0] if failed else None, "lengths": answers[0]["lengths"]}


def _raise_together(ranks: Ranks, failure: Exception | None, first_failed: int | None) -> None:
    """Where any rank failed, all do; the first of them tells why."""
    if first_failed is None:
        return
    if failure is None:
        failure = MegatrainError("another rank could not read the data", fix="see its message")
    if isinstance(failure, MegatrainError):
        failure.is_told = ranks.grid.rank != first_failed
    raise failure


def _has_documents(plan: Plan) -> bool:
    data = plan.config.data
    return data.reset_attention_mask or data.dataloader_inter_document_masking


class _Builder:
    def __init__(self, ranks: Ranks, plan: Plan) -> None:
        self.ranks = ranks
        self.plan = plan
        self.config = plan.config
        dp = ranks.grid.dp
        self.share = Share(
            micro_batch_size=self.config.training.micro_batch_size, dp_rank=dp.rank, dp_size=dp.size
        )

    def build(self, built: tuple[Splits | None, _Lengths]) -> RunBatches:
        splits, lengths = built[0] or Splits(None, None, None), built[1]
        derived, is_full = self.plan.derived, self.config.data.full_validation
        per_evaluation = self.config.training.eval_iters * derived.num_eval_microbatches

        def evaluation(
            split: str, name: str | None, samples: Samples | None, length: int, *, is_whole: bool
        ) -> EvaluationSet:
            whole = WholeOrder(self.share, length)
            order: Order = whole if is_whole else self._order(length)
            count = whole.num_microbatches if is_whole else per_evaluation
            return EvaluationSet(split, name, self._batches(samples, order), count, is_whole)

        evaluations = []
        if lengths.valid is not None:
            evaluations.append(evaluation("valid", None, splits.valid, lengths.valid, is_whole=is_full))
        for name, length in lengths.named_valid.items():
            named = splits.named_valid.get(name)
            evaluations.append(evaluation("valid", name, named, length, is_whole=True))
        if lengths.test is not None:
            evaluations.append(evaluation("test", None, splits.test, lengths.test, is_whole=False))
        train = None
        if lengths.train is not None:
            train = self._batches(splits.train, self._order(lengths.train))
        return RunBatches(train, tuple(evaluations))

    def _order(self, length: int) -> Order:
        data = self.config.data
        if data.dataloader_type == "cyclic":
            return CyclicOrder(self.share, length, data_sharding=not data.no_data_sharding)
        return SingleOrder(self.share, length)

    def _batches(self, samples: Samples | None, order: Order) -> Batches:
        if samples is None:
            return _NoTokens(self.ranks.device)
        return BatchLoader(
            samples,
            order,
            seq_length=self.config.data.seq_length,
            device=self.ranks.device,
            num_workers=self.config.data.num_workers,
            has_documents=_has_documents(self.plan),
        )


class _NoTokens:
    """The batches of a stage that computes with hidden states alone."""

    def __init__(self, device: torch.device) -> None:
        ids = torch.empty(0, 0, dtype=torch.int64, device=device)
        mask = torch.empty(0, 0, device=device)
        self.batch = Batch(tokens=ids, labels=ids, loss_mask=mask, position_ids=ids)

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:  # noqa: ARG002
        """See `Batches`."""
        return [self.batch] * num_microbatches

    def close(self) -> None:
        """See `Batches`."""
