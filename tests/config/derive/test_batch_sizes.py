"""Batch sizes by consumed samples equal Megatron-LM's (golden file)."""

import json
from pathlib import Path

import pytest

from megatrain.config.derive.batch_sizes import BatchSizes, SteppedBatch, parse_ramp, parse_steps
from megatrain.config.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "microbatches.json").read_text())


def sizes_of(case, rule):
    return BatchSizes(rule=rule, pass_size=case["micro_batch_size"] * case["data_parallel_size"])


def first_iterations(sizes, count):
    consumed, rows = 0, []
    for iteration in range(count):
        rows.append([iteration, consumed, sizes.at(consumed), sizes.num_microbatches(consumed)])
        consumed += sizes.at(consumed)
    return rows


@pytest.mark.parametrize("case", GOLDEN["constant"], ids=str)
def test_constant_batches_equal_megatron_lm(case):
    sizes = sizes_of(case, SteppedBatch(((0, case["global_batch_size"]),)))
    assert sizes.rule.at(0) == case["current"]
    assert sizes.at(0) == case["running"]
    assert sizes.num_microbatches(0) == case["num_micro_batches"]
    assert not sizes.misfits(is_decreased=case["decrease_batch_size_if_needed"])


@pytest.mark.parametrize("case", GOLDEN["step_schedule"], ids=lambda case: case["schedule"])
def test_stepped_batches_equal_megatron_lm(case):
    sizes = sizes_of(case, parse_steps(case["schedule"], seq_length=case["seq_length"]))
    assert [list(step) for step in sizes.rule.steps] == case["parsed"]
    misfits = sizes.misfits(is_decreased=False)
    for row in case["values"]:
        consumed = row["consumed_samples"]
        assert sizes.rule.at(consumed) == row["global_batch_size"]
        assert sizes.num_microbatches(consumed) == row["num_micro_batches"]
        assert (sizes.rule.at(consumed) in misfits) == bool(row["consistency_check_raises"])
    if not misfits and "first_iterations" in case:
        rows = case["first_iterations"]
        assert first_iterations(sizes, len(rows)) == rows


def ramp(case):
    words = [str(case[name]) for name in ("start_batch_size", "increment", "ramp_samples")]
    return parse_ramp(words, target=case["global_batch_size"])


RAMPS = [case for case in GOLDEN["linear_ramp"] if "raises" not in case]


@pytest.mark.parametrize("case", RAMPS, ids=lambda case: f"{case['start_batch_size']} {case['increment']}")
def test_ramps_equal_megatron_lm(case):
    sizes = sizes_of(case, ramp(case))
    for consumed, target, running, count in case["values"]:
        assert [sizes.rule.at(consumed), sizes.at(consumed), sizes.num_microbatches(consumed)] == [
            target,
            running,
            count,
        ]
    rows = case["first_iterations"]
    assert first_iterations(sizes, len(rows)) == rows


@pytest.mark.parametrize("case", [case for case in GOLDEN["linear_ramp"] if "raises" in case], ids=str)
def test_invalid_ramps_are_refused(case):
    with pytest.raises(ConfigError, match="--rampup-batch-size"):
        ramp(case)


@pytest.mark.parametrize("case", GOLDEN["train_iters_from_samples"], ids=str)
def test_numbers_of_iterations_equal_megatron_lm(case):
    steps = case["step_schedule"]
    rule = parse_steps(steps, seq_length=None) if steps else SteppedBatch(((0, case["global_batch_size"]),))
    sizes = BatchSizes(rule=rule, pass_size=1)
    found = sizes.iterations_to(case["train_samples"], consumed=0, fills_up=bool(steps))
    assert found == case["train_iters"]


@pytest.mark.parametrize("fills_up", [False, True])
@pytest.mark.parametrize("case", RAMPS, ids=lambda case: f"{case['start_batch_size']} {case['increment']}")
def test_a_resumed_run_reaches_the_same_end(case, fills_up):
    sizes = sizes_of(case, ramp(case))
    samples = 3 * case["ramp_samples"] + 7
    count = sizes.iterations_to(samples, consumed=0, fills_up=fills_up)
    end = sizes.samples_after(count, consumed=0)
    assert (end >= samples) == fills_up
    rows = first_iterations(sizes, count + 1)
    assert rows[-1][1] == end
    for done, consumed, *_ in rows[:: max(1, count // 20)]:
        assert done + sizes.iterations_to(samples, consumed=consumed, fills_up=fills_up) == count
        assert sizes.samples_after(count - done, consumed=consumed) == end


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10:8 20:16", "no threshold is 0"),
        ("0:8 1:16 1.0:32", "two thresholds fall on sample 1"),
        ("0:8 16", "'16' has no colon"),
        ("0:8 x:16", "'x' is not a number"),
        ("0:0", "a batch is 0"),
    ],
)
def test_invalid_steps_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_steps(text, seq_length=None)
