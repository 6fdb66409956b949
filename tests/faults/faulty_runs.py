"""Class S, whole runs: the storage fails during a save of a run.

--on-save-failure stop    exit code 1, also in status.json; the next start continues, and ends equal to the unbroken run
--on-save-failure warn    a warning; the run ends equal to the unbroken one, without the checkpoint that failed
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from run_here import metrics

from faults.case import require, unexpected_names
from faults.killed_runs import Ended
from faults.killing_disk import KillPlan
from faults.kills import INTERVAL, NUM_ITERATIONS, Chain, Golden
from megatrain.checkpoint.find import find_checkpoints

_ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES", "ESTALE")
_FAILING = 4
"""The iteration whose save fails."""


def failing_runs(chance: random.Random, folder: Path) -> Iterator[tuple[str, Chain, KillPlan, str]]:
    """Yield a name, a run, its fault and its policy."""
    golden = Golden(folder / "golden")
    for number, (error, is_async, policy) in enumerate(
        itertools.product(_ERRORS, (False, True), ("stop", "warn"))
    ):
        num_ranks = 2 if number % 3 == 2 else 1
        in_writer = is_async and chance.random() < 0.7
        plan = KillPlan(
            iteration=_FAILING,
            rank=chance.randrange(num_ranks) if in_writer or not is_async else 0,
            in_writer=in_writer,
            targets=(),
            operation=chance.choice(["create", "write", "sync"]),
            errno=getattr(errno, error),
        )
        chain = Chain(
            folder / f"faulty-{number}", folder / "logs", golden, num_ranks, is_async=is_async, keep_last=None
        )
        name = f"a run with {error}, {'async' if is_async else 'sync'}, {num_ranks} ranks, {policy}"
        yield name, chain, plan, policy


def check_failing_run(chain: Chain, plan: KillPlan, policy: str) -> str:
    """Run with a fault, and again without it."""
    if policy == "warn":
        return _warned(chain, plan)
    ended = chain.start(plan)
    _require_words(ended, plan)
    require(set(ended.exit_codes) == {1}, f"exit codes {ended.exit_codes}")
    status = json.loads((chain.folder / "status.json").read_text())
    require(status["exit_code"] == 1, f"status.json has exit code {status['exit_code']}")
    require(f"saving iteration {_FAILING} to" in status["reason"], f"the reason is {status['reason']}")
    require(chain.committed == {INTERVAL}, f"{chain.committed} are committed")
    require(not unexpected_names(chain.folder), f"the run leaves {unexpected_names(chain.folder)}")
    chain.start()
    require(chain.is_done, "the next start does not end with exit code 0")
    return "stops with exit code 1, and continues to the end: equal to the unbroken run"


def _warned(chain: Chain, plan: KillPlan) -> str:
    ended = chain.start(plan, more_flags=["--on-save-failure", "warn"])
    _require_words(ended, plan)
    require("> WARNING: saving iteration" in ended.output, "there is no warning")
    require(set(ended.exit_codes) == {0}, f"exit codes {ended.exit_codes}")
    found = {candidate.iteration for candidate in find_checkpoints(chain.folder)}
    expected = set(range(INTERVAL, NUM_ITERATIONS + 1, INTERVAL)) - {_FAILING}
    require(found == expected, f"there are checkpoints {found}")
    is_equal = metrics(chain.folder) == metrics(chain.golden.run(chain.num_ranks, chain.family))
    require(is_equal, "the metrics differ from those of the unbroken run")
    return "a warning; the run ends equal to the unbroken one"


def _require_words(ended: Ended, plan: KillPlan) -> None:
    assert plan.errno is not None
    words = [os.strerror(plan.errno), f"(errno {plan.errno})", str(f"iter_{_FAILING:07d}")]
    words += ["bytes needed", "bytes free"] if plan.errno == errno.ENOSPC else []
    missing = [word for word in words if word not in ended.output]
    require(not missing, f"the log lacks {missing}: {ended.output[-800:]}")
