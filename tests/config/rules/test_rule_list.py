"""The list of rules is complete, and a run that works breaks none of them."""

import runpy
from collections import Counter
from pathlib import Path

from megatrain.config.rule_list import DERIVATIONS, RULES, UNPROVEN

HERE = Path(__file__).parent


def test_the_working_run_breaks_no_rule(problems_of):
    assert problems_of() == []


def test_no_rule_is_listed_twice():
    assert [name for name, count in Counter(rule.name for rule in RULES).items() if count > 1] == []


def test_every_rule_has_a_case_that_breaks_it():
    tested = {"parity_is_required"}
    for path in HERE.rglob("test_rules_*.py"):
        values = runpy.run_path(str(path))
        tested |= {
            *values.get("CASES", ()),
            *values.get("TESTED_HERE", ()),
            *values.get("TESTED_ELSEWHERE", ()),
        }
    assert tested - {one.name for one in DERIVATIONS} == {one.name for one in (*RULES, *UNPROVEN)}
