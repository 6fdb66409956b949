"""How many samples a run asks for of each split, and the plans by which they are drawn.

    iterations, batches, evaluations     -> requested: samples of train, valid and test      (Megatron-LM's rule)
    requested, the plans of a checkpoint -> plans: what was planned stays, what is missing is appended

The order of samples depends on how many are planned. So a run keeps the plan that it began with, and one that grows
longer draws the samples beyond it by a further plan: nothing that was seen comes in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.config.plan import Answer, Draft
from megatrain.config.splits import SPLIT_NAMES
from megatrain.config.values import INVALID, UnsettledError


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """When a run evaluates, and on how much."""

    train_iters: int
    eval_interval: int | None
    eval_iters: int
    batch_size: int
    start_eval_at_iter: int | None = None
    skip_train: bool = False

    @property
    def rounds(self) -> int:
        """How often it evaluates on validation data."""
        if self.skip_train or self.eval_interval is None:
            return 1
        return (
            self.train_iters // self.eval_interval + 1 - (self.start_eval_at_iter or 0) // self.eval_interval
        )

    @property
    def valid_samples(self) -> int:
        """Validation samples of the whole run."""
        return self.rounds * self.eval_iters * self.batch_size

    @property
    def test_samples(self) -> int:
        """Test samples, read once, at the end."""
        return self.eval_iters * self.batch_size


def evaluations(draft: Draft) -> Evaluations:
    """The evaluations of a run."""
    training = draft.config.training
    return Evaluations(
        train_iters=draft.derived.train_iters,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        batch_size=training.eval_global_batch_size,
        start_eval_at_iter=training.start_eval_at_iter,
        skip_train=training.skip_train,
    )


def requested_train_samples(draft: Draft) -> Answer:
    training, read = draft.config.training, draft.derived.train_samples
    if training.train_samples is not None and training.train_samples >= read:
        return Answer(_settled(training.train_samples), "--train-samples")
    if training.decrease_batch_size_if_needed and training.train_iters is not None:
        iterations, batch = draft.derived.train_iters, training.global_batch_size
        if iterations * batch > read:  # as in Megatron-LM, which plans for what was asked for
            return Answer(iterations * batch, f"{iterations} iterations * global batch {batch}")
    return Answer(_settled(read), draft.origins["derived.train_samples"].detail)


def requested_valid_samples(draft: Draft) -> Answer:
    if draft.config.data.full_validation:
        return Answer(None, "all, with --full-validation")
    planned = evaluations(draft)
    stored, interval = draft.facts.checkpoint, planned.eval_interval
    if stored is not None and interval is not None:
        # Evaluations may have come more often before than they will.
        to_come = planned.rounds - stored.iteration // interval
        needed = stored.consumed_valid_samples + to_come * planned.test_samples
        if needed > planned.valid_samples:
            return Answer(
                needed, f"{stored.consumed_valid_samples} so far, and {to_come} evaluations to come"
            )
    return Answer(
        planned.valid_samples,
        f"{planned.rounds} evaluation{'s' * (planned.rounds != 1)} * {planned.eval_iters} iterations * global batch {planned.batch_size}",
    )


def requested_test_samples(draft: Draft) -> Answer:
    planned = evaluations(draft)
    return Answer(
        planned.test_samples, f"{planned.eval_iters} iterations * global batch {planned.batch_size}"
    )


def train_plan(draft: Draft) -> Answer:
    return _plan(draft, "train")


def valid_plan(draft: Draft) -> Answer:
    return _plan(draft, "valid")


def test_plan(draft: Draft) -> Answer:
    return _plan(draft, "test")


def _plan(draft: Draft, split: str) -> Answer:
    assert split in SPLIT_NAMES
    requested = _settled(getattr(draft.derived, f"requested_{split}_samples"))
    stored = draft.facts.checkpoint
    plans = stored.data_plans.get(split, ()) if stored else ()
    former = [count for count in plans if count]
    if requested is None:
        return Answer((None,), "all of one epoch")
    if not former:
        return Answer((requested,), "one plan for all samples")
    if draft.config.data.dataloader_type == "cyclic":
        return Answer(tuple(former), "the checkpoint's; the cyclic order goes round in it")
    plan = extended(former, requested)
    if len(plan) > len(former):
        return Answer(plan, f"the checkpoint's {_sum(former)}, and {plan[-1]} more with another seed")
    return Answer(plan, "the checkpoint's" + (", of which fewer are read" if requested < sum(former) else ""))


def extended(former: Sequence[int], requested: int) -> tuple[int, ...]:
    """Plans that hold `requested` samples and begin as the former ones."""
    missing = requested - sum(former)
    return (*former, missing) if missing > 0 else tuple(former)


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def _settled(value: Any) -> Any:
    """The value itself; trips over INVALID, which could pass through otherwise."""
    if value is INVALID:
        raise UnsettledError
    return value
