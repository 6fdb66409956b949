"""Learning-rate and weight-decay schedules against golden values of Megatron-LM."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Facts, StoredRun, parse, resolve
from megatrain.config.derive.lr_schedule import ScheduleValues
from megatrain.config.plan import Plan
from megatrain.config.schema.lr_decay import LR_STYLES, STYLE_SETTINGS, LrDecay
from megatrain.config.schema.optimizer import ScheduleConfig
from megatrain.config.schema.tree import settings
from megatrain.optim.lr_schedule import LR_FORMULAS, LrSchedule, WeightDecaySchedule
from megatrain.training.build import build_schedules

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())
WORKING = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1"
    " --mock-data --vocab-size 100 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
).split()


def lr_schedule(arguments: dict[str, Any]) -> LrSchedule:
    return LrSchedule.of(
        ScheduleValues(
            lr=arguments["max_lr"],
            min_lr=arguments["min_lr"],
            lr_warmup_init=arguments["init_lr"],
            lr_warmup_samples=arguments["lr_warmup_steps"],
            lr_decay_samples=arguments["lr_decay_steps"],
            lr_decay_style=arguments["lr_decay_style"],
            lr_wsd_decay_style=arguments.get("lr_wsd_decay_style", "exponential"),
            lr_wsd_decay_samples=arguments.get("wsd_decay_steps"),
            start_weight_decay=arguments["start_wd"],
            end_weight_decay=arguments["end_wd"],
            weight_decay_incr_style=arguments["wd_incr_style"],
            weight_decay_incr_samples=arguments["wd_incr_steps"],
        )
    )


def weight_decay_schedule(arguments: dict[str, Any]) -> WeightDecaySchedule:
    return WeightDecaySchedule(
        style=arguments["wd_incr_style"],
        start=arguments["start_wd"],
        end=arguments["end_wd"],
        increase_samples=arguments["wd_incr_steps"],
    )


def exactly(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_schedules_are_megatrons(case: dict[str, Any]) -> None:
    rate, decay = lr_schedule(case["arguments"]), weight_decay_schedule(case["arguments"])
    overrides = case.get("param_group_overrides", [{}])
    for samples, *rows in case["values"]:
        pairs = rows if "param_group_overrides" in case else [rows]
        for group, (lr, wd) in zip(overrides, pairs, strict=True):
            own = dataclasses.replace(
                rate, lr=group.get("max_lr", rate.lr), min_lr=group.get("min_lr", rate.min_lr)
            )
            own_decay = dataclasses.replace(
                decay, start=group.get("start_wd", decay.start), end=group.get("end_wd", decay.end)
            )
            assert own.at(samples) == exactly(lr)
            assert own_decay.at(samples) * group.get("wd_mult", 1.0) == exactly(wd)


def plan_of(arguments: dict[str, Any], stored: StoredRun | None = None) -> Plan:
    words = [
        word
        for name, value in arguments.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
        if value is not False
    ]
    return resolve(parse([*WORKING, *words]), Facts(checkpoint=stored))


@pytest.mark.parametrize("case", GOLDEN["from_command_line"], ids=lambda case: str(case["arguments"]))
def test_a_command_line_gives_megatrons_schedule(case: dict[str, Any]) -> None:
    plan = plan_of(case["arguments"])
    values = plan.derived.schedule
    assert plan.derived.train_iters == case["train_iters"]
    assert values.lr_warmup_samples == exactly(case["lr_warmup_steps"])
    assert values.lr_decay_samples == case["lr_decay_steps"]
    assert values.lr_wsd_decay_samples == case["wsd_decay_steps"]
    assert values.weight_decay_incr_samples == case["wd_incr_steps"]
    schedules = build_schedules(plan)
    for iterations, lr, wd in case["values"]:
        hyperparams = schedules.at(iterations * case["arguments"]["global_batch_size"])
        assert hyperparams.lr == exactly(lr)
        assert hyperparams.lr_of("embedding") == exactly(lr)
        assert hyperparams.weight_decay == exactly(wd)


RESTORE = GOLDEN["restore"]
NAMES = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "lr_warmup_samples",
    "lr_decay_steps": "lr_decay_samples",
    "lr_decay_style": "lr_decay_style",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
    "override_opt_param_scheduler": "override_opt_param_scheduler",
}


def restored(row: dict[str, Any]) -> Plan:
    """Resolve a run of 1000 samples that resumes the golden checkpoint, with batches of one sample."""
    use_checkpoint = "checkpoint values used" in row["what"]
    arguments = {**RESTORE["arguments"], **row.get("changed", {"max_lr": 1.0})}
    flags = {flag: arguments[name] for name, flag in NAMES.items() if name in arguments}
    flags |= {"train_samples": 1000, "global_batch_size": 1, "load": "c"}
    flags |= {"use_checkpoint_opt_param_scheduler": True} if use_checkpoint else {}
    first = plan_of(
        {flag: RESTORE["arguments"][name] for name, flag in NAMES.items() if name in RESTORE["arguments"]}
        | {"train_samples": 1000, "global_batch_size": 1}
    )
    stored = StoredRun(
        path="c",
        iteration=333,
        consumed_train_samples=333,
        config=first.config.to_dict(),
        schedule=first.derived.schedule.to_dict(),
    )
    return plan_of(flags, stored)


@pytest.mark.parametrize("row", RESTORE["rows"], ids=lambda row: row["what"])
def test_a_restored_schedule_is_megatrons(row: dict[str, Any]) -> None:
    if "raises" in row:
        with pytest.raises(Exception, match=r"--lr: the checkpoint has 0\.0003, this run 1\n"):
            restored(row)
        return
    schedules = build_schedules(restored(row))
    assert schedules.lr.lr == row["max_lr"]
    assert schedules.lr.lr_decay_samples == row["lr_decay_steps"]
    now, later = schedules.at(row["num_steps"]), schedules.at(row["num_steps"] + 100)
    assert [now.lr, now.weight_decay] == [exactly(row["lr"]), exactly(row["wd"])]
    assert [later.lr, later.weight_decay] == [
        exactly(row["after_100_more"]["lr"]),
        exactly(row["after_100_more"]["wd"]),
    ]


def test_embedding_and_output_layer_may_have_their_own_learning_rate() -> None:
    plan = plan_of(
        {
            "lr": 1e-3,
            "decoupled_lr": 4e-3,
            "decoupled_min_lr": 2e-3,
            "train_samples": 100,
            "global_batch_size": 1,
        }
    )
    schedules = build_schedules(plan)
    assert [schedules.at(n).lr for n in (0, 50, 100)] == [1e-3, 5e-4, 0.0]
    assert [schedules.at(n).lr_of("embedding") for n in (0, 50, 100)] == [4e-3, 3e-3, 2e-3]
    assert [schedules.at(n).lr_of("output") for n in (0, 50, 100)] == [4e-3, 3e-3, 2e-3]
    assert [schedules.at(n).lr_of("positions") for n in (0, 50, 100)] == [1e-3, 5e-4, 0.0]


def test_every_style_has_a_formula_and_a_meaning() -> None:
    assert LR_STYLES.keys() == LR_FORMULAS.keys()
    assert all(style.shape for style in LR_STYLES.values())


def test_settings_of_single_styles_are_those_that_a_checkpoint_stores_or_their_lengths_in_iterations() -> (
    None
):
    stored = {entry.name for entry in dataclasses.fields(LrDecay)} - {"lr_decay_style"}
    given = {entry.name for entry in dataclasses.fields(ScheduleConfig)}
    assert stored <= set(STYLE_SETTINGS) <= given
    assert all(name.replace("_iters", "_samples") in stored for name in STYLE_SETTINGS)
    assert all(style.final_decay in (None, *style.settings) for style in LR_STYLES.values())


@pytest.mark.parametrize("name", LR_STYLES)
def test_what_a_style_says_of_itself_is_true_of_its_formula(name: str) -> None:
    def rates(**changed: Any) -> list[float]:
        arguments: dict[str, Any] = {
            "lr": 1e-3,
            "lr_warmup_init": 0.0,
            "lr_warmup_samples": 10,
            "lr_decay_samples": 100,
        }
        given = {**arguments, "min_lr": 1e-4, "lr_decay_style": name, "lr_wsd_decay_samples": 20, **changed}
        decay: dict[str, Any] = {
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.1,
            "weight_decay_incr_style": "constant",
        }
        schedule = LrSchedule.of(ScheduleValues(**given, **decay, weight_decay_incr_samples=100))
        return [schedule.at(samples) for samples in (0, 10, 11, 50, 80, 81, 90, 100, 101, 500)]

    style = LR_STYLES[name]
    assert (rates() != rates(min_lr=2e-4)) == (rates() != rates(lr_decay_samples=90)) == style.decays
    assert (rates()[7] == 1e-4) == style.reaches_min_lr
    assert (rates()[-1] == 1e-4) == style.decays
    assert (rates()[4] == 1e-3) == (style.final_decay is not None or not style.decays)
    if style.final_decay is not None:
        assert rates(**{style.final_decay: 50})[4] < 1e-3
    for setting in settings():
        if setting.name in style.settings and not setting.name.endswith("_iters"):
            other = setting.choices[-1] if setting.choices else {int: 50, float: 0.7}[setting.kind]
            assert rates(**{setting.name: other}) != rates(), f"the formula does not read {setting.name}"
