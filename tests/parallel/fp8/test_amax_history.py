"""Delayed scaling: the history of largest values, its scales, and what a checkpoint keeps of it."""

import pytest
import torch

from megatrain.parallel.fp8.amax_history import AmaxHistory, LibraryTensor

CPU = torch.device("cpu")


def history(algorithm="max", length=3, margin=0):
    found = AmaxHistory(length, algorithm, margin, (), CPU)
    found.add("weight", torch.float8_e4m3fn)
    found.add("gradient", torch.float8_e5m2)
    return found


def after(found, *steps):
    for weight, gradient in steps:
        for number, value in enumerate((weight, gradient)):
            seen = found.seen(number)
            seen.copy_(torch.maximum(seen, torch.tensor(float(value))))
        found.finish_step()
    return found


@pytest.mark.parametrize(
    ("algorithm", "margin", "scales"),
    [
        ("most_recent", 0, (448, 57344 / 2)),
        ("max", 0, (448 / 8, 57344 / 2)),
        ("max", 3, (448 / 64, 57344 / 16)),
    ],
)
def test_the_algorithm_chooses_the_value_of_a_scale(algorithm, margin, scales):
    found = after(history(algorithm, margin=margin), (100, 1), (8, 1), (2, 2), (1, 2))
    assert [found.scale(number)[1].item() for number in (0, 1)] == pytest.approx(scales)


def test_products_can_read_each_scale():
    found = after(history(), (1, 2))
    assert all(found.scale(number).data_ptr() % 16 == 0 for number in (0, 1))


def test_a_tensor_has_no_scale_before_its_first_step():
    found = history()
    assert found.scale(0) is None
    assert after(found, (1, 1)).scale(0)[1] == 448


def test_values_that_are_zero_or_not_finite_are_left_out():
    found = after(history("most_recent"), (2, 4), (float("inf"), 0), (float("nan"), 0))
    assert [found.scale(number)[1].item() for number in (0, 1)] == [448 / 2, 57344 / 4]


def test_a_restored_history_continues_with_the_same_scales():
    steps = [(3, 1), (5, 1), (4, 7), (1, 2), (2, 1), (1, 1), (1, 1), (6, 1)]
    for cut in range(len(steps)):
        found, resumed = after(history(), *steps[:cut]), history()
        resumed.restore(found.state())
        for step in steps[cut:]:
            after(found, step)
            after(resumed, step)
            assert torch.equal(found.scale(0), resumed.scale(0))
            assert torch.equal(found.scale(1), resumed.scale(1))


def test_a_checkpoint_keeps_only_values_that_can_decide_a_scale():
    found = after(history(length=4), (9, 1), (5, 1), (7, 1), (6, 1))
    assert found.state() == {"weight": [(0, 6.0), (1, 7.0), (3, 9.0)], "gradient": [(0, 1.0)]}


def test_a_tensor_that_the_checkpoint_lacks_has_no_history():
    found = history()
    found.restore({"weight": [(0, 4.0)]})
    assert found.scale(0)[1] == 448 / 4
    assert found.scale(1) is None


def test_a_library_s_tensors_have_the_scales_of_others():
    seen, scales = torch.zeros(2), torch.ones(2)
    ours, theirs = history(), AmaxHistory(3, "max", 0, (), CPU)
    theirs.add("other", torch.float8_e4m3fn)
    for number, (name, dtype) in enumerate(
        (("weight", torch.float8_e4m3fn), ("gradient", torch.float8_e5m2))
    ):
        theirs.add(name, dtype, LibraryTensor(seen[number], scales[number]))
    for step in ((3, 1), (2, 7), (float("nan"), 0), (1, 1), (1, 1), (1, 2)):
        after(ours, step)
        seen += torch.tensor(step)
        theirs.finish_step()
        assert not seen.any()
        assert scales.tolist() == [ours.scale(number)[1].item() for number in (0, 1)]
    state = theirs.state()
    assert state.pop("other") == []
    assert state == ours.state()
    theirs.restore({"weight": [(0, 4.0)]})
    assert scales.tolist() == [448 / 4, 1]


def test_values_seen_before_a_restore_do_not_count():
    found = after(history(), (1, 1))
    state = found.state()
    found.seen(0).fill_(100)
    found.restore(state)
    assert after(found, (2, 2)).state() == after(history(), (1, 1), (2, 2)).state()


def test_a_snapshot_is_what_was_before_a_step():
    found = after(history(), (1, 1), (4, 4))
    restore = found.snapshot()
    after(found, (8, 8))
    found.seen(0).fill_(100)
    for _ in range(2):
        restore()
        assert after(found, (2, 2)).state() == after(history(), (1, 1), (4, 4), (2, 2)).state()
