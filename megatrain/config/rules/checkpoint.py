"""Rules about saving: which checkpoints are kept, and non-persistent checkpoints."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft


def retained_checkpoints_are_saved(draft: Draft) -> Iterator[Problem]:
    """As in Megatron-LM: otherwise no checkpoint, or only some, would fall on the interval."""
    interval, retained = draft.config.checkpoint.save_interval, draft.config.checkpoint.save_retain_interval
    if interval is not None and retained is not None and retained % interval:
        yield Problem(
            f"--save-retain-interval {retained} is not a multiple of --save-interval {interval}",
            f"use --save-retain-interval {-(-retained // interval) * interval}",
        )


def non_persistent_checkpoints_have_a_folder(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    interval, kind = checkpoint.non_persistent_save_interval, checkpoint.non_persistent_ckpt_type
    if interval is not None and kind is None:
        yield Problem(
            f"--non-persistent-save-interval {interval} is given without --non-persistent-ckpt-type",
            "add --non-persistent-ckpt-type global, or local with --non-persistent-local-ckpt-dir",
        )
    elif kind == "local" and checkpoint.non_persistent_local_ckpt_dir is None:
        yield Problem(
            "--non-persistent-ckpt-type local needs a folder",
            "add --non-persistent-local-ckpt-dir with a folder on a fast disk of the node",
        )


def groups_of_copies_fit_the_ranks(draft: Draft) -> Iterator[Problem]:
    checkpoint, world = draft.config.checkpoint, draft.derived.world_size
    if not checkpoint.replication or checkpoint.non_persistent_ckpt_type != "local":
        return
    jump, factor = checkpoint.replication_jump, checkpoint.replication_factor
    per_node = draft.facts.ranks_per_node
    if jump is None:
        yield Problem(
            "--replication is given without --replication-jump",
            f"add --replication-jump {per_node or 'with the number of ranks per node'}",
        )
    elif per_node and jump % per_node:
        yield Problem(
            f"--replication-jump {jump} with {per_node} ranks per node: copies would be on the node of the file itself",
            f"use --replication-jump {per_node}",
        )
    elif world % (jump * factor):
        yield Problem(
            f"{world} ranks do not divide into groups of --replication-factor {factor} nodes with --replication-jump {jump}",
            f"choose a --replication-factor that divides {world // jump or 1} nodes, or remove --replication",
        )


CHECKPOINT_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    retained_checkpoints_are_saved,
    non_persistent_checkpoints_have_a_folder,
    groups_of_copies_fit_the_ranks,
)
