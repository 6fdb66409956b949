"""Parts of all readers of foreign weights: rows of fused tensors, and the state that a manifest stores of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatrain.config import Plan
from megatrain.parallel.layout import Box


def rows_to_copy(rows: Sequence[slice], box: Box) -> Iterator[tuple[slice, range]]:
    """Yield the rows of a box of a canonical tensor, as slices of the box, and the rows of the foreign tensor that they are.

    Args:
        rows: ranges of rows of the foreign tensor that form the canonical one, in this order.
    """
    first, (low, high) = 0, box[0]
    for part in rows:
        whole = range(part.start, part.stop, part.step or 1)
        start, stop = max(low, first), min(high, first + len(whole))
        if start < stop:
            yield slice(start - low, stop - low), whole[start - first : stop - first]
        first += len(whole)


def stored_state(plan: Plan, **known: Any) -> dict[str, Any]:
    """Return the state of a run for a manifest; without `known` the state of a run that begins, from weights alone."""
    derived = plan.derived
    state = {
        "consumed_valid_samples": 0,
        "scheduled_samples": 0,
        "schedule": derived.schedule.to_dict(),
        "loss_scale": {},
        "expert_biases": {},
        "has_optimizer": False,
        "is_evaluation_left": False,
        "tokenizer_fingerprint": None,
        "end_token_ids": [],
        "data_plans": {
            "train": derived.train_plan,
            "valid": derived.valid_plan,
            "test": derived.test_plan,
        },
        "pass_size": plan.config.training.micro_batch_size * derived.data_parallel_size,
        "datasets": [],
    }
    assert known.keys() <= state.keys()
    return state | known
