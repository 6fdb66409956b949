"""Rules about logging: each fires, names its flags and a remedy."""

from megatrain.config import Facts

CASES = {
    "optional_packages_are_installed": [
        ("--tensorboard-dir tb", "", None,
         ("--tensorboard-dir tb",), ("pip install tensorboard", "--tensorboard-dir")),
        ("--log-energy", "", Facts(device="cuda"), ("--log-energy", "nvidia-ml-py"), ("pip install nvidia-ml-py",)),
        ("--wandb-project p", "", Facts(libraries={"tensorboard": "2"}),
         ("--wandb-project p",), ("pip install wandb", "--wandb-project")),
    ],
    "profiled_iterations_and_ranks_exist": [
        ("--profile --profile-step-start 5 --profile-step-end 5", "", None,
         ("--profile-step-end 5", "--profile-step-start 5"), ("--profile-step-end 7",)),
        ("--profile --profile-ranks 0 2", "", None, ("--profile-ranks 2",), ("--profile-ranks 0",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_a_dry_run_needs_no_package_and_notes_what_is_missing(plan_of):
    notes = plan_of("--dry-run --tensorboard-dir tb --wandb-project p").notes
    missing = [note for note in notes if "not installed on this host" in note]
    assert ["--tensorboard-dir tb" in missing[0], "--wandb-project p" in missing[1]] == [True, True]
    installed = Facts(libraries={"tensorboard": "2", "wandb": "0"})
    notes = plan_of("--dry-run --tensorboard-dir tb --wandb-project p", facts=installed).notes
    assert not [note for note in notes if "installed" in note]
