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
    tested = {path.stem.removeprefix("test_rules_") for path in HERE.rglob("test_rules_*.py")}
    assert [name for name in modules if name.rsplit(".", 1)[1] not in tested] == []
