"""Class K: processes of a run of a GPT, a BERT or a T5 are killed during its saves, and the run is started again.

    chain: run until a kill ─> what is on disk? ─> run again, killed in a later save ─> ... ─> run to the end: equal to the unbroken run

Expected after each kill: each iteration that the log called committed is there, intact, and equal to that of the unbroken run; no other
folder looks committed; the writer process is gone; the next start resumes from the newest committed iteration.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from run_here import LAYOUTS, folder_flags, metrics
from tiny_tokenizers import data_flags, write_corpus

from faults.case import Cases, judge, problems_of, require, unexpected_names
from faults.killed_runs import Ended, run
from faults.killing_disk import KillPlan
from megatrain.checkpoint.find import find_checkpoints, folder_name

NUM_ITERATIONS, INTERVAL = 8, 2
FLAGS = f"--num-layers 2 --train-iters {NUM_ITERATIONS}".split()
LAYOUT_OF = {1: "one process", 2: "tp2"}
FAMILIES = {
    "gpt": "",
    "bert": "--model-family bert",
    "t5": "--model-family t5 --decoder-seq-length 16 --num-query-groups 4 --position-embedding-type relative",
}
_KILLS_PER_CHAIN = 4
_SECONDS = 240.0
"""Limit of a case; this process only waits for the run."""
_OCCURRENCES = {"make_folder": 2, "create": 3, "write": 40, "sync": 3, "sync_folder": 3, "rename": 2}
"""Operations of a save by name. In the background, a rank only writes the manifest and the tracker."""
_OF_WRITER = {"create": 1, "write": 40, "sync": 1}
_OF_REMOVAL = {"rename": 3, "sync_folder": 4, "remove": 1}
"""The last ones with --keep-last."""


class Golden:
    """The unbroken runs by their number of ranks and family; each is trained when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019 (it lives as long as the bench)
    def run(self, num_ranks: int, family: str) -> Path:
        folder = self.folder / f"{family}-{num_ranks}"
        ended = run(self.flags(folder, num_ranks, family), self.folder / "logs", num_ranks=num_ranks)
        assert set(ended.exit_codes) == {0}, ended.output
        return folder

    @functools.cache  # noqa: B019
    def content(self, num_ranks: int, family: str, iteration: int) -> dict[str, object]:
        return content_of(self.run(num_ranks, family) / folder_name(iteration))

    def flags(self, folder: Path, num_ranks: int, family: str) -> list[str]:
        """Return the flags of a run that saves to `folder`."""
        layout = LAYOUTS[LAYOUT_OF[num_ranks]][1]
        data = [] if family == "gpt" else ["--no-mock-data", *data_flags(self.sentences, family)]
        of_family = [*FAMILIES[family].split(), *data]
        return [*FLAGS, *of_family, *layout, *folder_flags(folder), "--save-interval", str(INTERVAL)]

    @functools.cached_property
    def sentences(self) -> Path:
        """The folder of the data of BERT and T5."""
        folder = self.folder / "sentences"
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder, num_documents=100)
        return folder


def content_of(path: Path) -> dict[str, object]:
    """Return all that a checkpoint stores but the settings of its run."""
    manifest = json.loads((path / "manifest.json").read_text())
    own = {name: value for name, value in manifest.items() if name not in ("config", "checksum")}
    return own | {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


@dataclass
class Chain:
    """A run that is killed several times."""

    folder: Path
    logs: Path
    golden: Golden
    num_ranks: int
    is_async: bool
    keep_last: int | None
    family: str = "gpt"
    committed: set[int] = field(default_factory=set)
    """Iterations that are committed: they must stay, except for what --keep-last removes."""
    is_done: bool = False

    def start(self, plan: KillPlan | None = None, more_flags: list[str] | None = None) -> Ended:
        """Run until it is killed or ends, and check what it left."""
        flags = [*self.golden.flags(self.folder, self.num_ranks, self.family), *(more_flags or [])]
        flags += ["--async-save"] if self.is_async else []
        flags += ["--keep-last", str(self.keep_last)] if self.keep_last else []
        ended = run(flags, self.logs, num_ranks=self.num_ranks, plan=plan)
        expected = max(self.committed, default=0)
        if "> started in" in ended.output:
            require(
                ended.resumed_from == expected,
                f"iteration {expected} was committed, the run resumes from {ended.resumed_from}",
            )
        self.check_folder(ended)
        self.is_done = set(ended.exit_codes) == {0}
        if self.is_done:
            self.check_end(has_saved=bool(ended.acknowledged))
        return ended

    def check_folder(self, ended: Ended) -> None:
        """Check the checkpoints in the folder."""
        must = self.committed | ended.acknowledged
        found = set()
        for candidate in find_checkpoints(self.folder):
            problems = problems_of(candidate)
            require(not problems, f"{candidate.path.name} looks committed and is damaged: {problems}")
            found.add(candidate.iteration)
            if candidate.iteration not in self.committed:
                expected = self.golden.content(self.num_ranks, self.family, candidate.iteration)
                is_equal = content_of(candidate.path) == expected
                require(is_equal, f"{candidate.path.name} differs from that of the unbroken run")
        if self.keep_last:
            must = set(sorted(must)[-self.keep_last :])
            self.committed &= found
        lost = sorted(must - found)
        require(not lost, f"committed iterations are lost: {lost}; there are {sorted(found)}")
        self.committed |= found

    def check_end(self, *, has_saved: bool) -> None:
        """Check that the finished run equals the unbroken one; its last save removed what killed ones left."""
        unbroken = self.golden.run(self.num_ranks, self.family)
        require(
            metrics(self.folder) == metrics(unbroken), "the metrics differ from those of the unbroken run"
        )
        left = unexpected_names(self.folder)
        require(not left or not has_saved, f"leftovers at the end: {left}")
        require(max(self.committed) == NUM_ITERATIONS, f"the last checkpoint is {max(self.committed)}")
        for iteration in self.committed:
            expected = self.golden.content(self.num_ranks, self.family, iteration)
            is_equal = content_of(self.folder / folder_name(iteration)) == expected
            require(is_equal, f"iteration {iteration} differs from that of the unbroken run at the end")


def kills(count: int, folder: Path, seed: int = 0, families: Sequence[str] = tuple(FAMILIES)) -> Cases:
    """Yield cases until `count` processes or jobs were killed; half of the chains save in the background."""
    chance = random.Random(seed)
    golden = Golden(folder / "golden")
    num_kills = number = 0
    while num_kills < count:
        chain = Chain(
            folder / f"run-{number}",
            folder / "logs",
            golden,
            num_ranks=2 if number % 6 > 3 else 1,
            is_async=number % 2 == 0,
            keep_last=2 if number % 3 == 0 else None,
            family=families[(number + number // 3) % len(families)],
        )
        for _ in range(min(_KILLS_PER_CHAIN, count - num_kills)):
            if chain.is_done:
                break
            plan = plan_of_kill(chain, chance)
            work = functools.partial(_killed, chain, plan)
            case = judge("K", name_of(chain, plan), work, limit_seconds=_SECONDS)
            num_kills += case.outcome.startswith("killed")
            yield case
            if case.problem:
                break
        else:
            if not chain.is_done:
                work = functools.partial(_finished, chain)
                yield judge("K", name_of(chain, None), work, limit_seconds=_SECONDS)
        shutil.rmtree(chain.folder, ignore_errors=True)
        number += 1


def _killed(chain: Chain, plan: KillPlan) -> str:
    ended = chain.start(plan)
    if not ended.is_killed:
        require(chain.is_done, f"exit codes {ended.exit_codes}: {ended.output[-800:]}")
        return "ended before the kill"
    if "killed by SIGKILL" in ended.output:
        require(set(ended.exit_codes) <= {1}, f"exit codes {ended.exit_codes} after the writer was killed")
        return "killed: the writer; the run stops with exit code 1"
    where = "loading or training" if plan.iteration == 0 else "saving"
    return f"killed: {plan.targets[-1]}, while {where}{' in the background' if chain.is_async else ''}"


def _finished(chain: Chain) -> str:
    ended = chain.start()
    require(chain.is_done, f"exit codes {ended.exit_codes}: {ended.output[-800:]}")
    return "resumed to the end: equal to the unbroken run"


def plan_of_kill(chain: Chain, chance: random.Random) -> KillPlan:
    """Draw a moment in one of the next saves."""
    if chance.random() < 0.1:
        targets = (chance.choice(["rank", "job"]),)
        return KillPlan(iteration=0, in_writer=False, targets=targets, delay_seconds=chance.uniform(0, 0.6))
    last = max(chain.committed, default=0)
    nearest = min(last + INTERVAL * chance.choice([1, 1, 2]), NUM_ITERATIONS)
    rank = chance.randrange(chain.num_ranks)
    in_writer = chain.is_async and chance.random() < 0.5
    choices = [("rank",), ("job",)]
    if chain.is_async:
        choices += [("writer",), ("writer", "rank"), ("rank",) if in_writer else ("writer", "job")]
    targets = chance.choice(choices)
    if chance.random() < 0.4:
        span = 0.25 if chain.is_async else 0.06
        return KillPlan(
            iteration=nearest,
            rank=rank,
            in_writer=False,
            targets=targets,
            delay_seconds=chance.uniform(0, span),
        )
    occurrences = _OF_WRITER if in_writer else _OCCURRENCES
    if not in_writer and (chain.is_async or rank > 0):
        few = {"create": 2, "write": 2, "sync": 2} if chain.is_async else _OF_WRITER
        occurrences = _OCCURRENCES | few if rank == 0 else few
    if chain.keep_last and rank == 0 and not in_writer:
        occurrences = occurrences | _OF_REMOVAL
    if rank > 0 and chain.is_async:
        in_writer, occurrences = True, _OF_WRITER
    operation = chance.choice(list(occurrences))
    return KillPlan(
        iteration=nearest,
        rank=rank,
        in_writer=in_writer,
        targets=targets,
        operation=operation,
        occurrence=chance.randint(1, occurrences[operation]),
        place=chance.choice(["before", "inside", "after"]),
    )


def name_of(chain: Chain, plan: KillPlan | None) -> str:
    kind = f"{chain.family}, {'async' if chain.is_async else 'sync'}, {chain.num_ranks} ranks, keep-last {chain.keep_last}"
    if plan is None:
        return f"{kind}: resumed to the end"
    moment = (
        f"{plan.place} {plan.operation} {plan.occurrence}"
        if plan.operation
        else f"{plan.delay_seconds:.3f} s"
    )
    process = f"{'writer' if plan.in_writer else 'rank'} {plan.rank}"
    return f"{kind}: {'+'.join(plan.targets)} at iteration {plan.iteration}, {process}, {moment}"
