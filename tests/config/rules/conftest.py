"""Checks shared by the tests of rules. Every rule file has a test file of its own with a case for each rule."""

import pytest

from megatrain.config import ConfigError


def pytest_generate_tests(metafunc):
    """Run the test of a module's CASES with each of them."""
    if metafunc.function.__name__ == "test_a_problem_names_flags_and_remedy":
        cases = [case for of_rule in metafunc.module.CASES.values() for case in of_rule]
        metafunc.parametrize(("flags", "without", "facts", "named", "remedy"), cases)


@pytest.fixture
def assert_refused(plan_of):
    """Check that the working run with these changes has one problem, which names these flags and this remedy."""

    def check(flags, named, remedy, *, without="", facts=None):
        with pytest.raises(ConfigError) as caught:
            plan_of(flags, without=without, facts=facts)
        (problem,) = caught.value.problems
        assert [words for words in named if words not in problem.text] == [], problem.text
        assert [words for words in remedy if words not in problem.fix] == [], problem.fix

    return check
