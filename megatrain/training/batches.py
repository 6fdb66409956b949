"""Micro-batches of a run on one rank: builds a loader for each split of the plan.

    all ranks map cached indices, each builds a share of what is missing ──> the ranks of each host, if they do not see it ──> each rank alone
    samples + sampler ──> BatchLoader; ranks in the middle of a pipeline read nothing

Only the first and last pipeline stages, and that of multi-token prediction, need tokens; the stages between need document boundaries at most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatrain.config import Facts, Plan
from megatrain.config.derive.batch_sizes import length_steps, num_pieces
from megatrain.config.derive.vision import image_shape, sample_length, text_length
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.subjects.data_plans import train_end
from megatrain.config.user_function import user_function
from megatrain.data.fill_in_middle import fill_in_middle
from megatrain.data.pieces import Batches, PieceLoader
from megatrain.data.samples.build import BuiltIndex, PhaseSamples, SamplePlans, SplitBuilder, SplitDatasets
from megatrain.data.samples.dataset import SampleDataset, ShiftedDataset, TokenSpan
from megatrain.data.samples.gpt_dataset import SampleOptions, effective_pad
from megatrain.data.samples.index_cache import EVERYTHING, NotCachedError, Share
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import CyclicSampler, DataShard, FullSampler, Sampler, SingleSampler
from megatrain.data.samples.sources import blends_from_facts
from megatrain.data.samples.user_dataset import build_user_datasets, first_digests
from megatrain.parallel.batch import Batch
from megatrain.parallel.rank_lists import embedding_ranks
from megatrain.training.build import build_pipeline
from megatrain.training.family_samples import image_conversations, masked_samples, with_mock_images
from megatrain.training.launch.ranks import Ranks, grid_shape
from megatrain.training.planning.packs import pack_loader

_TURNS_OF_A_SHARE = 4
"""Turns until all is built: datasets, their blend, datasets of later phases, and the blends of these."""
_SECONDS_BETWEEN_REPORTS = 30.0
_COMPUTED_SECONDS = 1.0
"""Processor time since the last announcement without which a rank that builds samples makes no progress."""


@dataclass(frozen=True)
class EvaluationSet:
    """Samples with an evaluation loss of their own."""

    split: str
    dataset: str | None
    """Name of the dataset; None for a whole split."""
    batches: Batches
    sampler: Sampler | None
    """None: micro-batches are packs of whole samples."""
    num_microbatches: int
    """Micro-batches of each rank in one evaluation."""
    is_whole: bool
    """Each evaluation reads all samples, from the first one."""

    def num_samples(self, consumed_samples: int, num_microbatches: int) -> list[int] | None:
        """Return the samples of each of the rank's micro-batches, without padding; None: it has none."""
        if self.sampler is None:
            return None
        return [len(self.sampler.indices(consumed_samples, number)) for number in range(num_microbatches)]

    @property
    def name(self) -> str:
        """Name in the log."""
        split = "validation" if self.split == "valid" else self.split
        return split if self.dataset is None else f"{split} {self.dataset}"


@dataclass(frozen=True)
class RunBatches:
    """Training and evaluation data of a run."""

    train: Batches | None
    evaluations: tuple[EvaluationSet, ...]

    def close(self) -> None:
        """Stop background workers."""
        for batches in (self.train, *(one.batches for one in self.evaluations)):
            if batches is not None:
                batches.close()


def build_samples(
    plan: Plan,
    facts: Facts,
    log: Callable[[str], None] = print,
    on_built: Callable[[BuiltIndex], None] | None = None,
    *,
    checks_files: bool = False,
    share: Share = EVERYTHING,
) -> SplitDatasets:
    """Build the samples of a plan.

    Args:
        plan, facts: equal on all ranks.
        log, on_built, share: see `SplitBuilder`.
        checks_files: compare the files with the facts, which another host gathered.

    Raises:
        ConfigError: the data has fewer samples than requested.
        InputError: the files differ from the facts.
    """
    data, derived = plan.config.data, plan.derived
    options = _sample_options(plan, facts)
    plans = SamplePlans(
        train=(0,) if plan.config.training.only_evaluates else derived.train_plan,
        valid=derived.valid_plan if derived.requested_valid_samples != 0 else (0,),
        test=derived.test_plan if derived.requested_test_samples else (0,),
        seed=plan.config.training.seed,
    )
    if data.image_data_path:
        digests = [one.digest for one in facts.datasets] if checks_files else None
        return image_conversations(plan, plans, log, digests)
    function = user_function(plan.config, "data.dataset")
    if function is not None:
        return build_user_datasets(function, options, plans, data, plan.config.tokenizer)
    builder = SplitBuilder(
        options,
        cache_folder=data.data_cache_path,
        mmap=not data.no_mmap_bin_files,
        index_cache=data.object_storage_cache_path,
        surplus=data.mid_level_dataset_surplus,
        digests={one.prefix: one.digest for one in facts.datasets} if checks_files else None,
        log=log,
        on_built=on_built,
        masked=masked_samples(plan.config),
        share=share,
    )
    splits = builder.build(
        blends_from_facts(facts.datasets), data.split, plans, named_valid=data.separate_validation_sets
    )
    splits = with_mock_images(splits, plan.config)
    if plans.train != (0,):
        splits = builder.with_phases(splits, _phases(plan, facts), data.split, plans)
    if splits.train is not None and derived.train_start:
        splits = replace(splits, train=ShiftedDataset(splits.train, derived.train_start))
    if data.dataloader_type == "single":
        _require(splits.train, train_end(plan), "training", "fewer --train-iters")
        _require(splits.valid, derived.requested_valid_samples, "validation", "fewer --eval-iters")
        _require(splits.test, derived.requested_test_samples, "test", "fewer --eval-iters")
    return splits


def _sample_options(plan: Plan, facts: Facts) -> SampleOptions:
    """Return the options of all samples of a GPT."""
    data, derived = plan.config.data, plan.derived
    special = {*facts.special_ids, *([] if derived.eod_id is None else [derived.eod_id])}
    return SampleOptions(
        seq_length=text_length(plan.config),
        eod=derived.eod_id,
        pad=effective_pad(facts.pad_id, special, allow_ambiguous=data.allow_ambiguous_pad_tokens),
        vocab_size=derived.vocab_size,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        inter_document_masking=data.dataloader_inter_document_masking,
        conversations=data.sft,
        packs_documents=data.pack_documents,
        mock_lengths=data.varlen_mock_dataset_config_json,
        rewrite=fill_in_middle(data, plan.config.tokenizer, plan.config.training.seed)
        if data.fim_data
        else None,
    )


def _phases(plan: Plan, facts: Facts) -> list[PhaseSamples]:
    """Return the later phases of training with their data."""
    phases = []
    for phase in plan.derived.later_phases:
        ((name, blend),) = blends_from_facts(facts.datasets, phase.from_iteration).items()
        phases.append(
            PhaseSamples(
                from_iteration=phase.from_iteration,
                start=phase.start,
                plans=phase.plan,
                blend=blend,
                is_split=name == "all",
            )
        )
    return phases


def _require(samples: SampleDataset | None, wanted: int | None, name: str, fewer: str) -> None:
    if samples is not None and wanted is not None and len(samples) < wanted:
        raise ConfigError(
            f"the {name} data holds {len(samples)} samples, but the run needs {wanted}: datasets without weights are"
            " read once",
            fix=f"give each dataset a weight, so that it is read as often as necessary, add data, or ask for {fewer}",
        )


def build_batches(ranks: Ranks, plan: Plan, log: Callable[[str], None]) -> RunBatches:
    """Build this rank's loaders; all ranks call it.

    Raises:
        MegatrainError: on all ranks if one of them fails.
    """
    return _LoaderBuilder(ranks, plan).build(*_build_in_turns(ranks, plan, log))


@dataclass(frozen=True)
class _Lengths:
    """Number of samples of each split; ranks that read no samples need them too."""

    train: int | None
    valid: int | None
    test: int | None
    named_valid: dict[str, int] = field(default_factory=dict)
    first_samples: list[str] = field(default_factory=list)
    """See `first_digests`."""

    @classmethod
    def of(cls, splits: SplitDatasets) -> _Lengths:
        train, valid, test = (
            None if one is None else len(one) for one in (splits.train, splits.valid, splits.test)
        )
        named = {name: len(one) for name, one in splits.named_valid.items()}
        return cls(train, valid, test, named, first_digests(splits))


def _build_in_turns(
    ranks: Ranks, plan: Plan, log: Callable[[str], None]
) -> tuple[SplitDatasets | None, _Lengths]:
    """Return the samples, or None on a rank that reads none, and their number; the other ranks wait for a rank that builds."""
    waits, report = _reads_samples(plan, ranks.grid.pp.rank), _progress_report(log)
    splits, lengths = None, _Lengths(None, None, None)
    for share in _shares(ranks, plan):
        failure: Exception | None = None
        if waits and share is not None:
            try:
                # Another rank builds in this turn what is not cached.
                with contextlib.suppress(NotCachedError), _announced(ranks, plan):
                    splits = build_samples(
                        plan, ranks.facts, log, report, checks_files=not ranks.is_main, share=share
                    )
                    waits = False
            except Exception as error:  # noqa: BLE001 (the other ranks wait for an answer)
                failure = error
        answer = {
            "failed": failure is not None,
            "waits": waits,
            "lengths": vars(_Lengths.of(splits)) if splits else None,
        }
        found = ranks.grid.messages.gather_and_broadcast(answer, _conclusion)
        _raise_together(ranks, failure, found["first_failed"])
        if found["first_other"] is not None:
            raise _other_samples(ranks, plan, found["first_other"])
        if not found["waits"]:
            lengths = _Lengths(**found["lengths"])
            break
    return splits, lengths


def _shares(ranks: Ranks, plan: Plan) -> list[Share | None]:
    """Return what this rank builds in each turn; None: it waits for others.

    The ranks that read samples share what is missing, then those of each host, if hosts have disks of their own; a rank builds
    the rest alone if nothing can be stored.
    """
    data, size = plan.config.data, ranks.grid.world.size
    if size == 1 or (data.data_cache_path is None and data.dataset is None):
        return [EVERYTHING]
    if data.dataset is not None or data.image_data_path:  # are built as a whole
        own_turn = 0 if ranks.is_main else 1 if ranks.local_rank == 0 else 2
        return [None] * own_turn + [EVERYTHING] * (3 - own_turn)
    readers = _reading_ranks(plan)
    if ranks.grid.rank not in readers:
        return [None] * (2 * _TURNS_OF_A_SHARE + 1)
    first = ranks.grid.rank - ranks.local_rank
    here = [rank for rank in readers if first <= rank < first + (ranks.facts.ranks_per_node or size)]
    shares = [Share(members.index(ranks.grid.rank), len(members)) for members in (readers, here)]
    return [*(share for share in shares for _ in range(_TURNS_OF_A_SHARE)), EVERYTHING]


def _reading_ranks(plan: Plan) -> list[int]:
    """Return the ranks that read samples, in ascending order."""
    lists = grid_shape(plan).rank_lists("pp")
    stages = [stage for stage in range(len(lists[0])) if _reads_samples(plan, stage)]
    return sorted(members[stage] for members in lists for stage in stages)


def _progress_report(log: Callable[[str], None]) -> Callable[[BuiltIndex], None]:
    """Return a function that logs at times how many indices this rank has built."""
    count, reported = 0, time.monotonic()

    def report(built: BuiltIndex) -> None:
        nonlocal count, reported
        count += built.outcome == "built"
        if time.monotonic() > reported + _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            log(f"this rank has built {count:,} sample indices of its share, the last one of {built.source}")

    return report


def _reads_samples(plan: Plan, stage: int) -> bool:
    """Return whether ranks of a pipeline stage need tokens or document boundaries."""
    placement, later = build_pipeline(plan).placement, plan.later_embedding_stage
    is_at_end = placement.has_head(stage) or stage in embedding_ranks(
        placement, is_tied=False, later_stage=later
    )
    return is_at_end or plan.config.data.has_documents or plan.config.model.model_family in MASKED_FAMILIES


@contextlib.contextmanager
def _announced(ranks: Ranks, plan: Plan) -> Iterator[None]:
    """Let the other ranks wait while this one computes in the context, however long it does."""
    messages, heartbeat = ranks.grid.messages, None if ranks.watch is None else ranks.watch.heartbeat
    if messages.size == 1:
        yield
        return

    def is_alive() -> None:
        if heartbeat is not None:
            heartbeat.stalled_seconds = 0.0

    def announce() -> None:
        computed = time.process_time()
        while not ended.wait(plan.derived.startup_timeout_seconds / 10):
            if time.process_time() > computed + _COMPUTED_SECONDS:
                computed = time.process_time()
                messages.announce_progress()
                is_alive()

    ended, messages.on_progress = threading.Event(), is_alive
    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _conclusion(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first rank that failed, and the lengths of rank 0, which is on the first stage in any layout; None: it waits."""
    failed = (rank for rank, answer in enumerate(answers) if answer["failed"])
    lengths = answers[0]["lengths"]
    others = (
        rank for rank, answer in enumerate(answers) if lengths and answer["lengths"] not in (None, lengths)
    )
    return {
        "first_failed": next(failed, None),
        "first_other": next(others, None),
        "waits": any(answer["waits"] for answer in answers),
        "lengths": lengths,
    }


def _other_samples(ranks: Ranks, plan: Plan, rank: int) -> ConfigError:
    dataset = plan.config.data.dataset
    what = f"--dataset {dataset}: rank" if dataset else "the data: rank"
    return ConfigError(
        f"{what} {rank} has other samples than rank 0",
        fix="compute sample k from k and request.seed alone, and give all hosts the same files"
        if dataset
        else "give all hosts the same files",
        is_reported=not ranks.is_main,
    )


def _raise_together(ranks: Ranks, failure: Exception | None, first_failed: int | None) -> None:
    """Raise on all ranks if one failed; only the first that failed reports it."""
    if first_failed is None:
        return
    if failure is None:
        failure = MegatrainError("another rank could not read the data", fix="see the message of that rank")
    if isinstance(failure, MegatrainError):
        failure.is_reported = ranks.grid.rank != first_failed
    raise failure


class _LoaderBuilder:
    """Builds the loaders of one rank."""

    def __init__(self, ranks: Ranks, plan: Plan) -> None:
        self.ranks = ranks
        self.plan = plan
        self.config = plan.config
        self.has_packs = self.config.data.pack_documents
        dp, training = ranks.grid.dp, plan.config.training
        self.shard, self.evaluated = (
            DataShard(micro_batch_size=size, dp_rank=dp.rank, dp_size=dp.size)
            for size in (training.micro_batch_size, training.eval_micro_batch_size)
        )

    def build(self, splits: SplitDatasets | None, lengths: _Lengths) -> RunBatches:
        splits = splits or SplitDatasets(None, None, None)
        derived, is_full = self.plan.derived, self.config.data.full_validation
        per_evaluation = self.config.training.eval_iters * derived.num_eval_microbatches

        def evaluation(
            split: str, name: str | None, samples: SampleDataset | None, length: int, *, is_whole: bool
        ) -> EvaluationSet:
            whole = FullSampler(self.evaluated, length)
            sampler: Sampler = whole if is_whole else self._sampler(self.evaluated, length)
            count = whole.num_microbatches if is_whole else per_evaluation
            batches = self._batches(samples, sampler, length)
            return EvaluationSet(split, name, batches, None if self.has_packs else sampler, count, is_whole)

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
            train = self._batches(splits.train, self._sampler(self.shard, lengths.train), lengths.train)
            steps = length_steps(self.config)
            if steps is not None:
                train = PieceLoader(train, lambda consumed: num_pieces(steps, self.config, consumed))
        return RunBatches(train, tuple(evaluations))

    def _sampler(self, shard: DataShard, length: int) -> Sampler:
        data = self.config.data
        if data.dataloader_type == "cyclic":
            return CyclicSampler(shard, length, data_sharding=not data.no_data_sharding)
        return SingleSampler(shard, length)

    def _batches(self, samples: SampleDataset | None, sampler: Sampler, length: int) -> Batches:
        if samples is None:
            return _EmptyBatches(self.ranks.device)
        if self.has_packs:
            return pack_loader(self.plan, self.ranks.grid, self.ranks.device, samples, length)
        model = self.config.model
        return BatchLoader(
            samples,
            sampler,
            seq_length=sample_length(self.config),
            device=self.ranks.device,
            num_workers=self.config.data.num_workers,
            has_documents=self.config.data.has_documents,
            family="gpt" if model.model_family == "hybrid" else model.model_family,
            decoder_seq_length=model.decoder_seq_length,
            image_shape=image_shape(self.config),
        )


class _EmptyBatches:
    """Micro-batches without tokens, for a pipeline stage that only computes with hidden states. Implements `Batches`."""

    def __init__(self, device: torch.device) -> None:
        ids = torch.empty(0, 0, dtype=torch.int64, device=device)
        mask = torch.empty(0, 0, device=device)
        self.batch = Batch(tokens=ids, labels=ids, loss_mask=mask, position_ids=ids)

    def microbatches(self, consumed_samples: int, num_microbatches: int) -> list[Batch]:  # noqa: ARG002
        return [self.batch] * num_microbatches

    def spans(self, sample: int) -> list[TokenSpan]:  # noqa: ARG002
        return []

    def close(self) -> None:
        """See `Batches`."""
