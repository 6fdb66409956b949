"""The list of rules is complete, and a run that works breaks none of them."""

from collections import Counter
from pathlib import Path

from megatrain.config.rules.rule_list import RULES

HERE = Path(__file__).parent


def test_the_working_run_breaks_no_rule(problems_of):
    assert problems_of() == []


def test_no_rule_is_listed_twice():
    assert [rule.__name__ for rule, count in Counter(RULES).items() if count > 1] == []


def test_every_file_of_rules_has_a_test_file():
    modules = {rule.__module__ for rule in RULES if ".rules." in rule.__module__}
    assert [name for name in modules if not (HERE / f"test_rules_{name.rsplit('.', 1)[1]}.py").exists()] == []
