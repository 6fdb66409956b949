"""A small run that works, so that each test names only what it changes."""

import pytest

from megatrain.config import ConfigError, Facts, parse, resolve

WORKING = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-3 --micro-batch-size 2"
    " --train-iters 10 --mock-data --vocab-size 100 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
)


@pytest.fixture
def plan_of():
    """Resolve the working run with these flags added, and without those named in `without`."""

    def build(flags="", *, without="", facts=None):
        return resolve(parse(arguments(flags, without)), facts or Facts())

    return build


@pytest.fixture
def problems_of(plan_of):
    """All problems of the working run with these changes, as text; none if it resolves."""

    def collect(flags="", *, without="", facts=None):
        try:
            plan_of(flags, without=without, facts=facts)
        except ConfigError as error:
            return [str(problem) for problem in error.problems]
        return []

    return collect


@pytest.fixture
def arguments_of():
    """The command line of the working run with these flags added, and without those named in `without`."""
    return arguments


def arguments(flags, without):
    removed = without.split()
    kept = []
    for part in (" " + WORKING).split(" --")[1:]:
        if "--" + part.split()[0] not in removed:
            kept += ("--" + part).split()
    return kept + flags.split()
