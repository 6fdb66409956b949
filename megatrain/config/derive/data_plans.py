"""How many samples a run asks for of each split, and the plans by which they are drawn.

    iterations, batches, evaluations     -> requested: samples of train, valid and test      (Megatron-LM's rule)
    requested, the plans of a checkpoint -> plans: what was planned stays, what is missing is appended

The order of samples depends on how many are planned. So a run keeps the plan that it began with, and one that grows
longer draws the samples beyond it by a further plan: nothing that was seen comes in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.config.derive.datasets import SPLIT_NAMES
from megatrain.config.plan import DerivedValue, Draft, Plan


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
    def samples(self) -> int:
        """Samples of one evaluation."""
        return self.eval_iters * self.batch_size

    @property
    def planned(self) -> int:
        """Evaluations on validation data that Megatron-LM plans for: at times one more than there are."""
        if self.skip_train or self.eval_interval is None:
            return 1
        before = (self.start_eval_at_iter or 0) // self.eval_interval
        return max(0, self.train_iters // self.eval_interval + 1 - before)

    def is_due(self, iteration: int) -> bool:
        """Whether there is one behind this iteration: at the interval, and at the end of training."""
        if iteration >= self.train_iters:
            return True
        interval = self.eval_interval
        return (
            interval is not None and iteration % interval == 0 and iteration >= (self.start_eval_at_iter or 0)
        )

    def to_come(self, iteration: int) -> int:
        """How many there are behind later iterations than this one."""
        if self.skip_train:
            return 1
        if iteration >= self.train_iters:
            return 0
        at_interval = 0
        if self.eval_interval is not None:
            passed = max(iteration, (self.start_eval_at_iter or 0) - 1) // self.eval_interval
            at_interval = max(0, (self.train_iters - 1) // self.eval_interval - passed)
        return at_interval + 1


def evaluations(draft: Draft | Plan) -> Evaluations:
    """The evaluations of a run."""
    training = draft.config.training
    return Evaluations(
        train_iters=draft.derived.train_iters,
        eval_interval=training.eval_interval,
        eval_iters=training.eval_iters,
        # What passes of all ranks hold: less than --eval-global-batch-size where it is decreased to that.
        batch_size=draft.derived.num_eval_microbatches
        * training.micro_batch_size
        * draft.derived.data_parallel_size,
        start_eval_at_iter=training.start_eval_at_iter,
        skip_train=training.skip_train,
    )


def requested_train_samples(draft: Draft) -> DerivedValue:
    training, read = draft.config.training, draft.derived.train_samples
    if training.train_samples is not None and training.train_samples >= read:
        return DerivedValue(training.train_samples, "--train-samples")
    if training.decrease_batch_size_if_needed and training.train_iters is not None:
        iterations, batch = draft.derived.train_iters, training.global_batch_size
        if iterations * batch > read:  # as in Megatron-LM, which plans for what was asked for
            return DerivedValue(iterations * batch, f"{iterations} iterations * global batch {batch}")
    return DerivedValue(read, draft.origins["derived.train_samples"].detail)


def requested_valid_samples(draft: Draft) -> DerivedValue:
    if draft.config.data.full_validation:
        return DerivedValue(None, "all, with --full-validation")
    of_run, stored = evaluations(draft), draft.facts.checkpoint
    each = f"{of_run.eval_iters} iterations * global batch {of_run.batch_size}"
    consumed = stored.consumed_valid_samples if stored else 0
    to_come = of_run.to_come(stored.iteration if stored else 0)
    to_come += bool(stored and stored.is_evaluation_left)
    needed = consumed + to_come * of_run.samples
    if of_run.samples and needed > of_run.planned * of_run.samples:  # they came more often before, say
        return DerivedValue(needed, f"{consumed} so far, and {to_come} to come * {each}")
    return DerivedValue(of_run.planned * of_run.samples, f"{of_run.planned} * {each}")


def requested_test_samples(draft: Draft) -> DerivedValue:
    of_run = evaluations(draft)
    return DerivedValue(of_run.samples, f"{of_run.eval_iters} iterations * global batch {of_run.batch_size}")


def train_plan(draft: Draft) -> DerivedValue:
    return _plan(draft, "train")


def valid_plan(draft: Draft) -> DerivedValue:
    return _plan(draft, "valid")


def test_plan(draft: Draft) -> DerivedValue:
    return _plan(draft, "test")


def _plan(draft: Draft, split: str) -> DerivedValue:
    assert split in SPLIT_NAMES
    requested = getattr(draft.derived, f"requested_{split}_samples")
    stored = draft.facts.checkpoint
    plans = stored.data_plans.get(split, ()) if stored else ()
    former = [count for count in plans if count]
    if requested is None:
        return DerivedValue((None,), "all of one epoch")
    if not former:
        return DerivedValue((requested,), "one plan for all samples")
    if draft.config.data.dataloader_type == "cyclic":
        return DerivedValue(tuple(former), "the checkpoint's; the cyclic order goes round in it")
    plan = extended(former, requested)
    if len(plan) > len(former):
        return DerivedValue(plan, f"the checkpoint's {_sum(former)}, and {plan[-1]} more with another seed")
    return DerivedValue(
        plan, "the checkpoint's" + (", of which fewer are read" if requested < sum(former) else "")
    )


def extended(former: Sequence[int], requested: int) -> tuple[int, ...]:
    """Plans that hold `requested` samples and begin as the former ones."""
    missing = requested - sum(former)
    return (*former, missing) if missing > 0 else tuple(former)


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))
