"""Rules about saving: retained and non-persistent checkpoints."""

import pytest

from megatrain.config import Facts

SAVE = "--save s --save-interval 10"
TESTED_HERE = (
    "non_persistent_checkpoints_have_a_folder",
    "groups_of_copies_fit_the_ranks",
)
"""Rules that tests of this file break without CASES."""
LOCAL = "--non-persistent-save-interval 2 --non-persistent-ckpt-type local"


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        ("--save-retain-interval 25", ("--save-retain-interval 25", "--save-interval 10"), ("--save-retain-interval 30",)),
        ("--save-hf-interval 25", ("--save-hf-interval 25", "--save-interval 10"), ("--save-hf-interval 30",)),
        ("--non-persistent-save-interval 2", ("--non-persistent-ckpt-type",), ("--non-persistent-ckpt-type global",)),
        (LOCAL, ("local", "folder"), ("--non-persistent-local-ckpt-dir",)),
        ("--keep-last 1", ("--keep-last 1", "at least 2"), ("--keep-last",)),
        ("--non-persistent-ckpt-type in_memory", ("in_memory",), ("global or local",)),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(assert_refused, flags, named, remedy):
    assert_refused(f"{SAVE} {flags}", named, remedy)


def test_groups_of_copies_fit_the_ranks(plan_of, assert_refused):
    flags = f"{SAVE} {LOCAL} --non-persistent-local-ckpt-dir /fast --global-batch-size 48 --replication"
    facts = Facts(world_size=24, ranks_per_node=8)
    plan_of(f"{flags} --replication-jump 8 --replication-factor 3", facts=facts)
    assert_refused(flags, ("--replication-jump",), ("--replication-jump 8",), facts=facts)
    assert_refused(
        f"{flags} --replication-jump 4",
        ("--replication-jump 4", "8 ranks"),
        ("--replication-jump 8",),
        facts=facts,
    )
    assert_refused(
        f"{flags} --replication-jump 8", ("24 ranks", "--replication-factor 2"), ("3 nodes",), facts=facts
    )


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ("", None),
        ("--non-persistent-ckpt-type global", "s/non_persistent"),
        ("--non-persistent-ckpt-type global --non-persistent-global-ckpt-dir g", "g"),
        ("--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir l", "l"),
    ],
)
def test_the_type_selects_the_folder(plan_of, flags, folder):
    assert plan_of(f"--save s {flags}").config.checkpoint.non_persistent_folder == folder
