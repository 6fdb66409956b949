"""The tables of docs/from-megatron.md: grades of notes, and which command lines of Megatron-LM's functional tests start here.

    python scripts/command_lines.py      rewrites the tables and tests/golden/command-lines/starting.txt

Each line is resolved as on a machine with H100s and Transformer Engine, with the program and the number of ranks of its case. It starts,
starts without the effect of some flags so far, waits for a missing feature, or never starts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.config.megatron.flag_table import ANSWERS
from megatrain.config.megatron.flags import megatron_flags
from megatrain.config.plan_note import GRADES
from megatrain.config.rule_list import NOTES, UNPROVEN
from megatrain.config.schema.tree import settings
from megatrain.tools.port.launch import FAMILIES
from megatrain.tools.port.translate import H100

FILES: Final = ("gpt", "moe", "mixtral", "nemotron", "hybrid", "bert", "t5", "multimodal-llava")
_ROOT: Final = Path(__file__).parents[1]
PAGE: Final = _ROOT / "docs" / "from-megatron.md"
_FOLDER: Final = _ROOT / "tests" / "golden" / "command-lines"
STARTING: Final = _FOLDER / "starting.txt"
"""Cases that start; a test holds that none is lost."""
_RULES: Final = {
    r"--num-layers \d+ is not divisible by --pipeline": "interleaved and uneven pipeline stages",
    r"--fp8-recipe mxfp8": "MXFP8, which needs Blackwell GPUs",
}
"""Missing features that cause problems of rules."""

Status = Literal["starts", "starts, in part", "waits", "never"]


@dataclass(frozen=True)
class CommandLine:
    """A recorded training case."""

    case: str
    world_size: int
    flags: tuple[str, ...]

    @property
    def facts(self) -> Facts:
        """The facts of a machine on which the case would run."""
        return replace(H100, world_size=self.world_size, vocab_size=_word_pieces(self.flags))


@dataclass(frozen=True)
class Outcome:
    """The result for a command line."""

    case: str
    status: Status
    reasons: tuple[str, ...]
    """Features without effect so far, missing features, or problems."""


def recorded_command_lines(folder: Path = _FOLDER) -> Iterator[CommandLine]:
    """Read the recorded command lines; `{save}` and similar words become folders."""
    for name in FILES:
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            recorded = json.loads(line)
            flags = tuple(re.sub(r"\{(\w+)\}", r"/tmp/megatrain/\1", word) for word in recorded["flags"])
            family = FAMILIES[recorded.get("program", "pretrain_gpt.py")]
            flags = flags if family == "gpt" else ("--model-family", family, *flags)
            yield CommandLine(recorded["case"], recorded["world_size"], flags)


def _word_pieces(flags: Sequence[str]) -> int | None:
    """Return the size of BERT's vocabulary for its tokenizers, whose files are not read; None: flags give the size."""
    return 30522 if any(word.startswith("BertWordPiece") for word in flags) else None


def outcome_of(line: CommandLine) -> Outcome:
    """Resolve a command line. Other errors than ConfigError are faults of megatrain, and are raised."""
    try:
        plan = resolve(parse(line.flags), line.facts)
    except ConfigError as error:
        texts = [problem.text for problem in error.problems]
        missing = [_missing_feature(text) for text in texts]
        never = [_refusal(text) for text, feature in zip(texts, missing, strict=True) if feature is None]
        reasons = tuple(dict.fromkeys([*never, *filter(None, missing)]))
        return Outcome(line.case, "never" if never else "waits", reasons)
    pending = tuple(
        answer.feature
        for answer in ANSWERS
        if answer.kind == "pending"
        and any(f" no effect so far: {answer.feature} is missing" in note for note in plan.notes)
    )
    return Outcome(line.case, "starts, in part" if pending else "starts", pending)


def _missing_feature(text: str) -> str | None:
    """Return the feature whose lack is this problem; None: it is another problem."""
    for answer in ANSWERS:
        if answer.kind == "missing" and text.endswith(answer.text):
            return re.sub(r" (is|are) not supported( yet)?$", "", answer.text)
    return next((feature for pattern, feature in _RULES.items() if re.search(pattern, text)), None)


def _refusal(text: str) -> str:
    """Return the reason of a refused flag, or the problem itself."""
    refused = (
        answer.text for answer in ANSWERS if answer.kind == "refused" and text.endswith(f": {answer.text}")
    )
    return next(refused, text)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the section as Markdown."""
    counts = Counter(outcome.status for outcome in outcomes)
    start = counts["starts"] + counts["starts, in part"]
    summary = (
        f"Of {len(outcomes)} recorded command lines {start} start ({start / len(outcomes):.0%}):"
        f" {counts['starts']} with all their flags, {counts['starts, in part']} with flags for speed, memory or"
        f" supervision that have no effect so far (results are the same); {counts['waits']} wait for a missing"
        f" feature, {counts['never']} never start."
    )
    lines = [
        summary,
        "",
        "| without effect so far | lines |",
        "|---|---|",
    ]
    lines += _counts(outcomes, "starts, in part")
    lines += ["", "| missing | lines |", "|---|---|", *_counts(outcomes, "waits")]
    lines += ["", "| never | lines |", "|---|---|", *_counts(outcomes, "never")]
    lines += ["", "The lines that do not start with all their flags:", "", "| case | result |", "|---|---|"]
    lines += [
        f"| `{outcome.case}` | {outcome.status}: {'; '.join(outcome.reasons)} |"
        for outcome in outcomes
        if outcome.status != "starts"
    ]
    return "\n".join(lines)


def starting(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the cases that start."""
    return [outcome.case for outcome in outcomes if outcome.status in ("starts", "starts, in part")]


def _counts(outcomes: Sequence[Outcome], status: Status) -> list[str]:
    counts = Counter(reason for outcome in outcomes if outcome.status == status for reason in outcome.reasons)
    return [f"| {reason} | {count} |" for reason, count in counts.most_common()]


def grades() -> str:
    """Return the table of grades as Markdown: the notes of the plan, and the flags whose loss costs speed or memory."""
    rows = ["| grade | notes | flags |", "|---|---|---|"]
    answers = [flag for flag in megatron_flags().values() if not flag.answer.is_refusal]
    for grade, words in GRADES.items():
        notes = [one.name.replace("_", " ") for one in (*NOTES, *UNPROVEN) if one.grade == grade]
        flags = [flag.flag for flag in answers if flag.answer.grade == grade]
        flags += [
            one.flag for one in settings() if grade == "cost" and any(need.is_costly for need in one.needs)
        ]
        shown = (
            f"{len(flags)} flags of Megatron-LM"
            if grade == "nothing"
            else ", ".join(f"`{flag}`" for flag in flags)
        )
        rows.append(f"| {words} | {'; '.join(notes)} | {shown} |")
    return "\n".join(rows)


def page_with(page: str, **sections: str) -> str:
    """Return the page with these sections between their markers."""
    for name, text in sections.items():
        begin, end = (f"<!-- {words}{name.replace('_', ' ')} -->" for words in ("", "end of "))
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Rewrite the table of the page, and the list of cases that start."""
    outcomes = [outcome_of(line) for line in recorded_command_lines()]
    page = page_with(PAGE.read_text(encoding="utf-8"), command_lines=table(outcomes), grades=grades())
    PAGE.write_text(page, encoding="utf-8")
    STARTING.write_text("".join(f"{name}\n" for name in starting(outcomes)), encoding="utf-8")


if __name__ == "__main__":
    main()
