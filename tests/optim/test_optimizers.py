"""Every --optimizer has its rule of updates and its learning rates: none falls back to another one's."""

import dataclasses
from typing import get_args, get_type_hints

import pytest

from megatrain.config import Facts, parse, resolve
from megatrain.config.derive.lr_schedule import group_learning_rates
from megatrain.config.schema.optimizer import OptimizerConfig
from megatrain.optim.update_rules import AdamwRule, LionRule, SgdRule
from megatrain.training.build import UPDATE_RULES

RULES = {"adam": AdamwRule, "sgd": SgdRule, "lion": LionRule}
OF_MATRICES = ("muon", "adaptive_muon", "soap")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --position-embedding-type rope --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 8"
)


@pytest.mark.parametrize("name", get_args(get_type_hints(OptimizerConfig)["optimizer"]))
def test_every_optimizer_has_its_rule_and_rates(name: str) -> None:
    plan = resolve(parse([*MODEL.split(), "--optimizer", name]), Facts(vocab_size=8, eod_id=0))
    config = plan.config.optimizer
    assert type(UPDATE_RULES[config.of_elements](config)) is RULES["adam" if name in OF_MATRICES else name]
    wide = dataclasses.replace(plan.config.model, use_mup=True, mup_width_mult=2.0)
    _, reason = group_learning_rates(wide, config, plan.derived.schedule)
    assert "width multiplier 2" in reason
