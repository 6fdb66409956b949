"""The features that `megatrain parity` compares with one another, and the pairs of them that are refused.

    OPTIONS ──> the rows of `megatrain parity`: every pair of words is in at least one row (tools/parity/rows.py)
       ├──────> a line of the plan, if a run uses a value that these tables do not list (rules/unproven.py)
       └──────> a rule of `resolve`: a run uses no pair of REFUSED_PAIRS
    NUMBER_FORMATS ──> additional rows in fp32, bf16 and fp16 (tools/parity/low_precision.py)

One table thus decides both what is verified and what is named as unproven. It lists features, not sizes: tensor parallelism is
verified for the sizes 2, 3, 4 and 8 and allowed for any.

To add a value of an option, add one `Feature` with the flags that select it and a predicate on the resolved
configuration. To add an option, add an `Option` with at least two features; the first is the default of a row. To add
a model, add a line to tools/parity/models.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.parity_features.experts import EXPERT_OPTIONS
from megatrain.config.parity_features.feature import Feature, Option, PlanOrDraft, RefusedPair
from megatrain.config.parity_features.number_formats import NUMBER_FORMATS
from megatrain.config.parity_features.parallelism import PARALLEL_OPTIONS
from megatrain.config.parity_features.training import TRAINING_OPTIONS
from megatrain.config.plan import Draft
from megatrain.config.schema.pipeline_schedules import ONE_CHUNK, PIPELINE_SCHEDULES, word_of_schedule
from megatrain.config.schema.tree import flag_of

OPTIONS: Final = (*PARALLEL_OPTIONS, *EXPERT_OPTIONS, *TRAINING_OPTIONS)

REFUSED_PAIRS: Final[tuple[RefusedPair, ...]] = (
    RefusedPair(
        ("zero0", "instances"),
        "an instance has no sharded state",
        "remove --num-distributed-optimizer-instances, or what turns sharding off (--no-use-distributed-optimizer,"
        " --data-parallel-sharding-strategy no_shard)",
    ),
    *(
        RefusedPair(
            (word_of_schedule(name), "moeoverlap"),
            "it combines no forward and backward passes",
            "use --pipeline-schedule dualpipe-v, or remove --overlap-moe-expert-parallel-comm",
        )
        for name, traits in PIPELINE_SCHEDULES.items()
        if name != ONE_CHUNK and not traits.overlaps_passes
    ),
    RefusedPair(
        ("muon", "offload"),
        "the matrix products of Muon are too slow on a CPU",
        "remove --optimizer-cpu-offload, or use --optimizer adam",
    ),
)
"""Pairs that no row of parity has and that `resolve` refuses."""


def features_of(plan: PlanOrDraft, options: Sequence[Option] = OPTIONS) -> dict[str, Feature]:
    """Return the features that a plan uses, by name, without those that have no effect."""
    used = {
        feature.name: feature for option in options for feature in option.features if feature.is_used(plan)
    }
    return {
        name: feature
        for name, feature in used.items()
        if not feature.needs or any(need in used for need in feature.needs)
    }


def unlisted_values(draft: Draft, options: Sequence[Option] = (*OPTIONS, *NUMBER_FORMATS)) -> Iterator[str]:
    """Yield the flags of each option whose value the table does not list, without those at their defaults."""
    defaults = type(draft.config)()
    for option in options:
        if not any(feature.is_used(draft) for feature in option.features):
            values = {path: draft.config.get(path) for path in option.settings}
            yield " ".join(
                f"{flag_of(path)} {value}"
                for path, value in values.items()
                if value not in (None, False, defaults.raw(path))
            )


def features_are_supported_together(
    draft: Draft,
    options: Sequence[Option] = (*OPTIONS, *NUMBER_FORMATS),
    refused: Sequence[RefusedPair] = REFUSED_PAIRS,
) -> Iterator[Problem]:
    """Rule: no two features form a refused pair."""
    used = features_of(draft, options)
    for refused_pair in refused:
        first, second = (used.get(name) for name in refused_pair.pair)
        if first is not None and second is not None:
            yield Problem(
                f"{first.flags} is not supported together with {second.flags}: {refused_pair.reason}",
                refused_pair.fix,
            )
