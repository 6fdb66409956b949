"""Notes and problems of a command line alone."""

import pytest

from megatrain.config import parse


@pytest.fixture
def notes_and_problems():
    """Return the notes and the problems of parsing these arguments, as text."""

    def collect(*argv):
        request = parse(argv)
        return list(request.notes), [str(problem) for problem in request.problems]

    return collect
