"""`megatrain parity --runs` and `--random N`: real runs, by fixed rows or drawn configurations.

words ──> Case ──> RunComparer ──> a line each ──> a finding is shrunk, and its commands are printed ──> summary
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, get_args

import numpy as np

from megatrain.config import ConfigError
from megatrain.data.indexed.writer import IndexedWriter, token_dtype
from megatrain.tools.parity.runs.case import Case
from megatrain.tools.parity.runs.compare import Kind, RunComparer, Verdict, problems_of
from megatrain.tools.parity.runs.draw import drawn_words
from megatrain.tools.parity.runs.fixes import fixed_start
from megatrain.tools.parity.runs.options import SENTENCES, SPECIAL, WORD_PIECES
from megatrain.tools.parity.runs.program import Patch
from megatrain.tools.parity.runs.shrink import shrunk, shrunk_words

RUN_ROWS: Final = (
    "dp2 maskends evaluates",
    "tp2 sp dp2 mixtral ep2 etp1 dropping fullvalidation",
    "dp2 resumes qwen",
    "pp2 validsets tokens maskends gpt2",
    "cp2 documents evalstart fromone",
    "tp2 sp deepseek etp1 seqauxloss chunkedloss ramp micro1",
    "dp2 zero3 resumes blend mtp1 samples35",
    "tp2 pp2 tied evalbatch batch12 zeros paramsnorm",
    "dp3 batch12 fullvalidation samples35 cosine",
    "dp2 bf16 resumes asyncsave qwenmoe ep2",
    "dp4 zero1 overlap muon heldout storeddocuments fullvalidation",
    "tp2 sp cp2 mixtral ep2 auxloss bert evaluates resumes",
    "dp2 pp2 t5 evalbatch toone",
    "dp2 soap resumes",
)
"""Rows of `--runs`."""
_VOCAB_SIZE: Final = 101
_END: Final = _VOCAB_SIZE - 1
"""End of a document, by NullTokenizer's rule."""
_START: Final = (5, 17, 5)
_SHAPES: Final = {"alike": (150, 2, 30), "varied": (40, 20, 60), "held": (23, 5, 40)}
"""Number of documents, least and most tokens of one."""
_MOST_DRAWS: Final = 20
"""Draws per configuration that runs; more are refused only if something is wrong."""
_SECONDS_TO_SHRINK: Final = 900.0


def run_rows(arguments: argparse.Namespace) -> bool:
    """Run the fixed rows, or the one of --layouts; return whether all are equal."""
    rows = [" ".join(arguments.layouts)] if arguments.layouts else RUN_ROWS
    table = RunTable(_folder(arguments.output), arguments.minutes)
    verdicts = [table.run(number, tuple(row.split())) for number, row in enumerate(rows, 1)]
    for verdict in verdicts:
        if verdict.kind == "refused":
            print(f"a row is refused: {verdict.lines[0]}")
    return table.print_summary() and all(verdict.kind == "equal" for verdict in verdicts)


def run_random(arguments: argparse.Namespace) -> bool:
    """Run drawn configurations; return whether all are equal and no fix is refused."""
    print(f"{arguments.random} configurations of seed {arguments.seed}, each against one process", flush=True)
    table = RunTable(_folder(arguments.output), arguments.minutes)
    for number in range(1, arguments.random + 1):
        if table.is_late:
            print(f"the time limit of {arguments.minutes} minutes ends the run before configuration {number}")
            break
        words = next(table.accepted(_draws(arguments.seed, number, arguments.layouts)), None)
        if words is None:
            raise ConfigError(
                f"--layouts {' '.join(arguments.layouts)}: {_MOST_DRAWS} configurations with these words are refused",
                fix="use other words",
            )
        table.run(number, words)
    return table.print_summary()


def _folder(output: str | None) -> Path:
    return Path(output) if output else Path(tempfile.mkdtemp(prefix="megatrain-parity-"))


def _draws(seed: int, number: int, fixed: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for attempt in range(_MOST_DRAWS):
        yield drawn_words(seed, number * _MOST_DRAWS + attempt, fixed)


class RunTable:
    """Judges cases one after the other, and prints a line for each.

    Args:
        folder: of the datasets, and of the runs of the current case.
        minutes: time limit; None: no limit.
        patches: changes of the program in the runs of layouts.
    """

    def __init__(self, folder: Path, minutes: float | None = None, patches: tuple[Patch, ...] = ()) -> None:
        self.data = folder.absolute() / "data"
        write_corpus(self.data)
        self.comparer = RunComparer(folder.absolute() / "runs", patches)
        self.kinds: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """By text, without its numbers."""
        self.refused_fixes: dict[str, str] = {}
        """Refusals of fixed command lines, by the refusal that proposed the fix."""
        self.cases: dict[tuple[str, ...], str] = {}
        """Kind of each finding by the fewest words that show it."""
        self.began = time.monotonic()
        self.deadline = None if minutes is None else self.began + 60 * minutes

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def accepted(self, draws: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        """Yield the draws that `resolve` accepts; count the others, and try the fix of each."""
        for words in draws:
            case = Case.of(words, self.data)
            problems = self.comparer.refusal(case)
            if not problems:
                yield words
                continue
            self.kinds["refused"] += 1
            self.refusals.update({_without_numbers(problem.text) for problem in problems})
            self._try_fixes(case)

    def _try_fixes(self, case: Case) -> None:
        for start in (case.reference, *case.starts):
            save = self.comparer.folder / "not-there"
            problems = problems_of(start, save)
            better = fixed_start(start, problems) if problems else None
            again = problems_of(better, save) if better else ()
            if better and again:
                proposed = " | ".join(f"{one.text}; fix: {one.fix}" for one in problems)
                text = (
                    f"{proposed}\n    then: {again[0].text}; fix: {again[0].fix}\n    {start.command(save)}"
                )
                self.refused_fixes.setdefault(_without_numbers(" ".join(one.text for one in problems)), text)

    def run(self, number: int, words: tuple[str, ...]) -> Verdict:
        """Judge a case and print its line; shrink it if it is a finding."""
        began = time.monotonic()
        verdict = self.comparer.compare(Case.of(words, self.data))
        self.kinds[verdict.kind] += 1
        print(
            f"{number:4d}  {verdict.kind:<8} {time.monotonic() - began:6.1f} s  {' '.join(words)}", flush=True
        )
        if verdict.kind == "refused":
            self.refusals[_without_numbers(verdict.lines[0])] += 1
        for line in verdict.lines if verdict.is_finding else ():
            print(f"      {line}", flush=True)
        if verdict.is_finding:
            known = next((few for few in self.cases if set(few) <= set(words)), None)
            if known is None:
                self._shrink(words, verdict)
            else:
                print(f"      contains the finding {' '.join(known)}: not shrunk", flush=True)
        return verdict

    def _shrink(self, words: tuple[str, ...], verdict: Verdict) -> None:
        """Print the smallest case with a verdict like this one, and the commands of both its runs."""
        deadline = time.monotonic() + _SECONDS_TO_SHRINK

        def fails(case: Case) -> bool:
            if time.monotonic() > deadline:
                return False
            return self.comparer.compare(case, has_dry_runs=verdict.is_of_dry_run).is_like(verdict)

        few = shrunk_words(words, self.data, fails)
        print(f"      smallest words: {' '.join(few)}", flush=True)
        case = shrunk(Case.of(few, self.data), fails)
        self.cases[few] = verdict.kind
        for line in self.comparer.compare(case).lines:
            print(f"      {line}")
        if case.has_chunks:
            print("      only with the loss in chunks of a few tokens, which no flag sets")
        for command in case.commands(self.comparer.folder):
            print(f"      {command}", flush=True)

    def print_summary(self) -> bool:
        """Print the counts; return whether there is no finding."""
        for text, count in self.refusals.most_common():
            print(f"refused {count:4d}  {text}")
        for text in self.refused_fixes.values():
            print(f"a fix is refused in turn: {text}")
        for words, kind in self.cases.items():
            print(f"{kind:<8} {' '.join(words)}")
        print(
            ", ".join(f"{self.kinds[kind]} {kind}" for kind in get_args(Kind))
            + f", {len(self.refused_fixes)} fixes refused"
        )
        return not (self.cases or self.refused_fixes)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d[\d,.]*", "N", text)[:160]


def write_corpus(folder: Path) -> None:
    """Write the datasets that `folder` lacks, which are as awkward as real ones, and the same in each call.

        alike    short documents that start with the same tokens, so that routers score their first tokens equally
        varied   longer documents, for blends and separate validation sets
        sentences, vocab.txt    documents of several sentences, for other families than GPT

    No number of samples divides a batch, so that a validation of the whole set ends with a part of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, (num_documents, least, most)) in enumerate(_SHAPES.items()):
        if (folder / f"{name}.idx").exists():
            continue
        rng = np.random.default_rng(number)
        with IndexedWriter(folder / name, token_dtype(_VOCAB_SIZE)) as writer:
            for _ in range(num_documents):
                tokens = rng.integers(0, _END, rng.integers(least, most))
                if name == "alike":
                    tokens[: len(_START)] = _START[: len(tokens)]
                writer.add_document([[*tokens, _END]])
    if not (folder / f"{SENTENCES}.idx").exists():
        (folder / "vocab.txt").write_text("\n".join(WORD_PIECES) + "\n", encoding="utf-8")
        rng, ids = np.random.default_rng(len(_SHAPES)), (len(SPECIAL), len(WORD_PIECES))
        with IndexedWriter(folder / SENTENCES, token_dtype(len(WORD_PIECES))) as writer:
            for _ in range(150):
                lengths = rng.integers(3, 12, rng.integers(2, 6))
                writer.add_document([rng.integers(*ids, length).tolist() for length in lengths])
