"""Settings that a run takes from a checkpoint, or from the configuration that another run has saved: code is none of them."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config import ConfigError, Facts, Request, parse, resolve, to_yaml
from megatrain.config.facts import StoredRun
from megatrain.config.schema.resume_class import FUNCTION, SHAPE, SILENT
from megatrain.config.schema.tree import Config, Origin, paths_of, settings
from megatrain.config.stored_settings import stored_settings
from megatrain.tools.parity.measure import teacher_of, tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import Layout

FACTS = Facts(world_size=1, vocab_size=101, eod_id=100)
ROUTERS = ("sinkhorn", "quantiles", "dropping", "dropspadded", "severallosses", "biasedexperts")
WORDS = [*(word for word in MODELS if word != "own"), *(f"mixtral {word}" for word in ROUTERS)]
"""Models of parity without code of the user."""
OF_TRAINING = ("documents tokens", "zloss auxloss mixtral", "mtp2", "adaptivemuon", "soap", "qkclip", "lora")
TRAINING = "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --mock-data"


def test_a_function_that_a_checkpoint_names_is_not_taken():
    request = parse(["--load", "c", "--eval-only"])
    for style, expected in (("cosine", "cosine"), ("theirs.py:decay", None)):
        stored = {"schedule": {"lr_decay_style": style}, "data": {"dataset": "theirs.py:data"}}
        taken = stored_settings(stored, request, with_layout=True, with_training=True)
        assert taken.get("schedule.lr_decay_style") == expected
        assert "data.dataset" not in taken


@pytest.mark.parametrize("words", WORDS)
def test_a_run_takes_model_and_losses_from_its_checkpoint(words: str):
    """All settings of both sections, but those of initial weights; also where it starts from the weights alone."""
    plan = tiny_plan(Layout.of(words), 1)
    config, drawn = plan.config.to_dict(), {"init_method_std": 0, "embedding_init_method_std": 0}
    stored = StoredRun(path="c", iteration=2, consumed_train_samples=16, config=config)
    for flags, found in (
        ("--eval-only", stored),
        (f"--use-checkpoint-args --finetune {TRAINING}", replace(stored, is_start=True).weights_only),
    ):
        request = parse(["--load", "c", "--device", "cpu", *flags.split()])
        taken = stored_settings(
            config, request, with_layout=False, with_training=request.config.training.eval_only
        )
        again = resolve(request, replace(FACTS, checkpoint=replace(found, settings=taken))).config
        assert replace(again.model, **drawn) == replace(plan.config.model, **drawn)
        assert again.experts == plan.config.experts


def test_an_evaluation_of_averages_does_not_evaluate_the_weights_unasked():
    config = tiny_plan(Layout.of("ema"), 1).config.to_dict()
    for more in ("", "--no-eval-with-ema"):
        request = parse(["--load", "c", "--device", "cpu", "--eval-only", *more.split()])
        taken = stored_settings(config, request, with_layout=False, with_training=True)
        stored = StoredRun(path="c", iteration=2, consumed_train_samples=16, config=config, settings=taken)
        with (
            nullcontext()
            if more
            else pytest.raises(ConfigError, match="fix: add --no-eval-with-ema, or --load")
        ):
            resolve(request, replace(FACTS, checkpoint=stored))


@pytest.mark.parametrize("words", [*WORDS, *OF_TRAINING])
def test_a_flag_that_is_left_out_is_refused_or_named(words: str):
    """A resume names each setting that changes with it, a start from the weights alone each one of their function."""
    plan = tiny_plan(Layout.of(words), 1)
    run = StoredRun(
        path="c",
        iteration=2,
        consumed_train_samples=16,
        config=json.loads(json.dumps(plan.config.to_dict())),
        schedule=plan.derived.schedule.to_dict(),
    )
    of_function = paths_of(SHAPE, FUNCTION)
    given = {path: origin for path, origin in plan.origins.items() if origin.is_given}
    for left_out in given:
        for stored in (run, replace(run, is_start=True).weights_only):
            values = {path: plan.config.raw(path) for path in given if path != left_out}
            values |= {"checkpoint.load": "c", "checkpoint.finetune": stored.is_start}
            origins = {one.path: Origin("default") for one in settings()} | dict.fromkeys(
                values, Origin("flag")
            )
            try:
                again = resolve(
                    Request(Config().with_values(values), origins), replace(FACTS, checkpoint=stored)
                )
            except ConfigError:
                continue
            notes = " ".join(map(str, again.notes))
            for one in settings():
                is_meant = one.path in of_function if stored.is_start else one.on_resume is not SILENT
                if is_meant and again.config.raw(one.path) != plan.config.raw(one.path):
                    assert f"{one.flag} " in notes, (left_out, one.path)


SCHEDULED = (
    "--rampup-batch-size 2 2 8",
    "--global-batch-size auto --step-batch-size-schedule 0:4,192:8",
    "--lr-decay-style WSD --lr-wsd-decay-samples 8 --lr-warmup-fraction 0.3",
    "--seq-length-schedule 0:12,240:24",
    "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.2",
)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        *((words, "") for words in (*WORDS, "teacher", "tokens fixedpacks")),
        *(("llama", f"--train-iters none --train-samples 32 {more}") for more in SCHEDULED),
    ],
)
def test_a_saved_configuration_resolves_to_itself(words: str, more: str, tmp_path: Path):
    layout = Layout.of(words)
    plan = tiny_plan(layout, 1, *more.split())
    teacher = teacher_of(layout, vocab_size=101, seq_length=24) if layout.has("teacher") else None
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(plan.config, plan.origins))
    assert resolve(parse(["--config", str(file)]), replace(FACTS, teacher=teacher)).config == plan.config
