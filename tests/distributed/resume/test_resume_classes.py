"""A setting that may change on resume as safe changes no step: weights of three steps with one value and with another.

model or option  x  values of a setting ──> three steps in fp64 ──> weights, compared
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from everyday import nightly
from run_here import trainer_of_command_line

from megatrain.config import ConfigError, Facts, Plan, parse, resolve
from megatrain.config.schema.resume_class import LOSS, SAFE, STEPS
from megatrain.config.schema.tree import Setting, settings
from megatrain.tools.parity.measure import weights_of
from megatrain.tools.parity.models import MODELS

Weights = dict[str, npt.NDArray[np.float64]]
_EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
_BIASES = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
BASE = (
    "--num-layers 4 --num-attention-heads 48 --hidden-size 48 --kv-channels 4 --ffn-hidden-size 96 --init-method-std 0.1"
    " --max-position-embeddings 64 --seq-length 24 --tokenizer-type NullTokenizer --vocab-size 101 --micro-batch-size 2"
    " --global-batch-size 8 --lr 3e-3 --adam-eps 1e-6 --eval-iters 0 --params-dtype float64 --device cpu --log-interval 1000"
    " --make-vocab-size-divisible-by 1 --train-iters 3 --mock-data --null-tokenizer-eod-id 7 --null-tokenizer-pad-id 7"
)
RUNS = [
    MODELS["llama"],
    f"{MODELS['gpt2']} --eod-mask-loss",
    f"{MODELS['llama']} {_EXPERTS}",
    *(f"{MODELS['llama']} --optimizer {name}" for name in ("muon", "adaptive_muon", "soap", "sgd", "lion")),
    f"{MODELS['llama']} {_EXPERTS} --moe-expert-capacity-factor 0.5",
    f"{MODELS['llama']} {_EXPERTS} --moe-router-load-balancing-type quantile_balancing",
    f"{MODELS['llama']} {_EXPERTS} {_BIASES}",
    f"{MODELS['llama']} --qk-clip --qk-clip-threshold 0.01",
    f"{MODELS['llama']} --lora-rank 2 --lora-dropout 0.1 --lora-alpha 64",
    f"{MODELS['llama']} --mtp-num-layers 1",
    f"{MODELS['llama']} --qat int4 --qat-group-size 16",
    *(MODELS[name] for name in ("olmo2", "dsa", "vlm")),
]
"""The first in which a setting has an effect are tried."""
MOST_RUNS = 3
NO_STEP = ("logging", "checkpoint", "parallel", "resilience", "tokenizer", "distillation")
"""Sections of what runs between the steps, of layouts (parity proves them), of files, and of teachers, which need a checkpoint."""
ROUNDING = (
    "bf16 fp16 grad_reduce_in_bf16 params_dtype fp8_format fp4_format exp_avg_dtype exp_avg_sq_dtype muon_fp32_matmul_prec"
    " moe_router_dtype loss_scale"
).split()
STARTS = "init_method_std embedding_init_method_std train_iters train_samples max_position_embeddings".split()
"""Safe once a run has begun: initial weights, the end, and a limit whose weights have a rule of their own."""
OTHERS = {
    "training.rampup_batch_size": ["--rampup-batch-size 4 4 16 --train-iters none --train-samples 24"],
    "training.step_batch_size_schedule": ["--global-batch-size auto --step-batch-size-schedule 0:4,200:8 --train-iters none --train-samples 24"],
    "training.iterations_to_skip": ["--iterations-to-skip 1"],
    "training.recompute_modules": ["--recompute-granularity selective --recompute-modules mlp"],
    "training.global_batch_size": ["--global-batch-size 4"],
    "optimizer.qk_clip": ["--qk-clip --qk-clip-threshold 0.01"],
    "precision.qat_group_size": ["--qat-group-size 8"],
    "training.loss": ["--loss {folder}/mine.py:squares"],
    "data.seq_length_schedule": ["--seq-length-schedule 0:12"],
    "experts.moe_router_load_balancing_type": ["--moe-router-load-balancing-type seq_aux_loss"],
    "experts.moe_aux_loss_coeff": ["--moe-aux-loss-coeff 0.3"],
}  # fmt: skip


def flags_of(setting: Setting) -> list[str]:
    """Return flags that give a setting other values than its default."""
    default = setting.default
    if setting.path in OTHERS:
        return OTHERS[setting.path]
    if setting.kind is bool:
        return [setting.flag, setting.opposite_flag]
    if setting.choices:
        return [f"{setting.flag} {choice}" for choice in setting.choices]
    number = default if isinstance(default, int | float) else 2
    others = {int: (number + 1, max(number - 1, 1)), float: (number / 2 or 0.3, 0.7)}.get(setting.kind, ())
    return [f"{setting.flag} {value}" for value in others]


@functools.cache
def plan_of(words: str) -> Plan | None:
    try:
        return resolve(parse(words.split()), Facts(digests={"training.loss": "1"}))
    except ConfigError:
        return None


@functools.cache
def weights_after(words: str) -> Weights:
    trainer = trainer_of_command_line(0, 1, words.split())
    trainer.resume()
    assert trainer.train() == 0
    return {part.name: np.array(part.values) for part in weights_of(trainer.engine)}


def changes(setting: Setting, folder: Path) -> Iterator[float]:
    """Yield how much weights differ because of a setting, in each run in which it has an effect."""
    runs = 0
    for run in RUNS:
        before = plan_of(words := f"{BASE} {run}")
        assert before is not None, run
        for flags in flags_of(setting):
            after = plan_of(changed := f"{words} {flags.format(folder=folder)}")
            if after is None or after.config.get(setting.path) == before.config.get(setting.path):
                continue
            config, derived = after.config, after.derived

            def value_of(path: str, config=config, derived=derived) -> object:  # type: ignore[no-untyped-def]
                section, name = path.split(".")
                return getattr(derived, name) if section == "derived" else config.get(path)

            if all(need.holds(value_of) for need in setting.needs):
                yield difference(weights_after(words), weights_after(changed))
                runs += 1
                break
        if runs == MOST_RUNS:
            return


def difference(a: Weights, b: Weights) -> float:
    """Return the largest difference, in units of a tensor's largest value, or of 1e-3 where weights are rounding errors.

    Scales of numbers that one run alone has are left out.
    """
    both = [(a[name], b[name]) for name in a.keys() & b.keys() if a[name].shape == b[name].shape]
    return max(float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-3)) for x, y in both)


def tried(setting: Setting) -> bool:
    is_evaluation = setting.name.startswith(("eval", "start_eval")) or "validation" in setting.name
    is_of_steps = setting.section not in NO_STEP and not is_evaluation
    is_code = setting.name == "spec" or setting.name.endswith("_digest")
    return (
        is_of_steps
        and not is_code
        and setting.name not in (*ROUNDING, *STARTS, *UNSEEN, "device", "skip_train")
    )


UNSEEN = (
    "allow_ambiguous_pad_tokens data_schedule phase_transition_iterations decrease_batch_size_if_needed"
    " soap_precondition_frequency"
).split()
"""Settings whose effect needs files, padding, other ranks or more steps than these runs have."""
CASES = [setting for setting in settings() if tried(setting) and setting.on_resume in (SAFE, STEPS, LOSS)]


@pytest.mark.parametrize(
    "setting",
    [one if one.on_resume is LOSS else nightly(one) for one in CASES],
    ids=lambda setting: setting.path,
)
def test_a_safe_setting_changes_no_step_and_another_one_does(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def squares(inputs):\n    return inputs.cross_entropy**2\n")
    found = list(changes(setting, tmp_path))
    assert (max(found, default=0) > 1e-9) == (setting.on_resume is not SAFE)
