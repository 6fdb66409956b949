"""Loss scaling follows Megatron-LM's rule."""

import json

import pytest

from megatrain.optim.loss_scale import MOST_STUCK_STEPS, DynamicLossScaler, LossScaler


def scaler(**changed: float) -> DynamicLossScaler:
    values = {"scale": 64.0, "minimum": 4.0, "window": 3, "hysteresis": 2} | changed
    return DynamicLossScaler(
        scale=values["scale"],
        minimum=values["minimum"],
        window=values["window"],
        hysteresis=int(values["hysteresis"]),
    )


def scales(one: DynamicLossScaler, steps: str) -> list[float]:
    """Return the scale after each step: `+` is a finite step."""
    found = []
    for step in steps:
        one.update(is_finite=step == "+")
        found.append(one.scale)
    return found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("-", [64]),  # patience
        ("--", [64, 32]),
        ("----", [64, 32, 16, 8]),  # halving does not restore the patience
        ("------", [64, 32, 16, 8, 4, 4]),  # not below the minimum
        ("--++-", [64, 32, 32, 32, 16]),  # a few finite steps do not either
        ("--+++-", [64, 32, 32, 32, 64, 64]),  # a whole window does
        ("--+++--", [64, 32, 32, 32, 64, 64, 32]),
        ("++-+++", [64, 64, 64, 64, 64, 128]),  # a window is consecutive finite steps
        ("++++++", [64, 64, 128, 128, 128, 256]),
        ("-+++-", [64, 64, 64, 128, 128]),
    ],
)
def test_the_scale_follows_megatrons_rule(steps: str, expected: list[float]) -> None:
    assert scales(scaler(), steps) == expected


@pytest.mark.parametrize("at", range(8))
def test_a_restored_scale_continues_unchanged(at: int) -> None:
    steps = "--+-+++--+++-+"
    whole, first, second = scaler(), scaler(), scaler(scale=1.0)
    expected = scales(whole, steps)
    scales(first, steps[:at])
    second.restore(json.loads(json.dumps(first.state())))
    assert scales(second, steps[at:]) == expected[at:]


def test_a_constant_scale_stays() -> None:
    constant = LossScaler(8.0)
    constant.update(is_finite=False)
    constant.restore({"scale": 4.0})
    assert constant.scale == 8.0
    assert constant.state() == {}


@pytest.mark.parametrize(
    ("one", "with_finite_loss", "without"),
    [
        (LossScaler(), False, False),
        (LossScaler(8.0, skips_gradients=True), True, False),
        (LossScaler(skips_all=True), True, True),
        (scaler(), True, True),
    ],
    ids=["none", "constant", "unchecked", "dynamic"],
)
def test_steps_that_are_skipped_and_steps_that_are_errors(
    one: LossScaler, with_finite_loss: bool, without: bool
) -> None:
    assert one.skips(1.0) == with_finite_loss
    assert one.skips(float("nan")) == without


@pytest.mark.parametrize(
    ("steps", "is_error"),
    [
        ("-" * (5 + MOST_STUCK_STEPS), True),  # from 64 to 4 in 5 steps
        ("-" * (4 + MOST_STUCK_STEPS), False),
        ("-" * (4 + MOST_STUCK_STEPS) + "+-", False),
    ],
)
def test_repeated_overflow_at_the_smallest_scale_is_an_error(steps: str, is_error: bool) -> None:
    one, unchecked = scaler(), scaler()
    unchecked.skips_all = True
    scales(one, steps)
    scales(unchecked, steps)
    assert one.skips(float("nan")) != is_error
    assert unchecked.skips(float("nan"))


def test_repeated_overflow_at_a_constant_scale_is_an_error() -> None:
    one, unchecked = LossScaler(8.0, skips_gradients=True), LossScaler(skips_all=True)
    for _ in range(MOST_STUCK_STEPS - 1):
        one.update(is_finite=False)
    assert one.skips(1.0)
    one.update(is_finite=False)
    assert not one.skips(1.0)
    one.update(is_finite=True)
    assert one.skips(1.0)
    for _ in range(MOST_STUCK_STEPS):
        unchecked.update(is_finite=False)
    assert unchecked.skips(1.0)
