"""Rules about schedules: each fires, names its flags and a remedy."""

CASES = {
    "warmup_ends_before_decay": [
        ("--lr-warmup-iters 10", "", None, ("20 samples",), ("shorten", "--lr-warmup-iters", "--lr-decay-iters")),
    ],
    "learning_rates_are_in_order": [
        ("--min-lr 1", "", None, ("--min-lr 1.0", "--lr 0.001"), ("--min-lr 0.001",)),
        ("--lr-warmup-init 1", "", None, ("--lr-warmup-init 1.0", "--lr 0.001"), ("--lr-warmup-init 0.001",)),
    ],
    "decoupled_rates_are_in_order": [
        ("--decoupled-lr 1e-4 --min-lr 5e-4", "", None,
         ("--min-lr 0.0005", "--decoupled-lr 0.0001"), ("--decoupled-min-lr 0.0001",)),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", "", None,
         ("--decoupled-min-lr 0.001", "--decoupled-lr 0.0001"), ("--decoupled-min-lr 0.0001",)),
    ],
    "wsd_decay_has_one_length": [
        ("--lr-decay-style WSD", "", None,
         ("--lr-decay-style WSD",), ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-samples 4", "", None,
         ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-samples 4"), ("remove --", ", or --")),
    ],
    "wsd_decay_fits_the_schedule": [
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20", "", None,
         ("40 samples", "sample 20"), ("--lr-wsd-decay-iters 10 or less",)),
    ],
    "weight_decay_schedule_is_complete": [
        ("--weight-decay-incr-style linear", "", None,
         ("--weight-decay-incr-style linear",), ("--start-weight-decay", "--end-weight-decay")),
        ("--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1", "", None,
         ("--end-weight-decay 0.1", "--start-weight-decay 0.2"), ("--end-weight-decay 0.2",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
