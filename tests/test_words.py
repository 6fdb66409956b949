"""Hold retired words out of code, docs and messages, and docstrings to plain sentences (docs/contributing.md, "Words").

files of the repository -> lines -> one finding for each retired word, with the term to use instead
docstrings, field docs and comments -> their first word -> one finding for each that opens with a relative clause
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".md", ".sh", ".yaml", ".toml", ".html"}
THIS_FILE = "tests/test_words.py"

RETIRED = {
    r"visit(s|ed|or|ors|ing)?": "token-expert assignment, dispatched token",
    r"bring(s|ing)?|brought": "dispatch, combine, fetch, allocate, gather",
    r"tell(s|ing)?|told": "report, return, log",
    r"travel(s|led|ling)?": "is sent, is communicated",
    r"rooms?|neighbours?": "memory, capacity, adjacent rank",
    r"meets?|meeting place": "occurs together, rendezvous, satisfies",
    r"(go|goes|going|gone|went) on( with)?": "resume, continue",
    r"behind": "after",
    r"beside": "next to, concurrently with",
    r"in front of": "before",
    r"on (its|their) way": "in flight",
    r"under ?way": "pending, in flight",
    r"own[ _-]layers?": "custom layer",
    r"written[ _-](out[ _-])?(attention|scores)|WrittenAttention": "eager attention",
    r"context[ _]ways": "cp_comm_types",
    r"turn_heads|turn_back|Rotation": "apply_rope, RotaryEmbedding",
    r"publish(es|ed)?": "all_gather_weights",
    r"Visitors|Exchange|bring_back|_Trip|_Way": "DispatchedTokens, TokenDispatcher, combine, AllToAllSplits, DispatchState",
    r"Joined|Borders|Narrowing|Beside|Foreign|StepUnderway|Told": "SoftmaxMerge, CuSeqlens, CastToWeightDtype, WithSharedExpert, TEModuleAdapter, PendingStep, StepMetrics",
    r"is_told|slope": "is_reported, derivative",
    r"LaidOutModule|(Local|TransformerEngine)?Leaves|looker|Glance": "ShardedModule, LocalBuilder, observer, UnresponsiveRank",
    r"keeps_parts|((key|value)_)?head_channels|plain_channels|(convolution|num)_taps": "returns_partial_sums, head_dim, qk_nope_head_dim, kernel_size",
    r"wide (dtype|numbers?|weights?)|main[ _](weights?|dtype|params?)": "accumulation dtype, master weights",
    r"borders?": "boundary, cu_seqlens",
    r"of which|in which case of": "split the sentence",
    r"nobody|somebody|everybody|whoever|whichever|whatever": "name the rank, user or value",
    r"houses?": "program, repository, structure",
}
"""Pattern of a whole word or phrase, and what to write instead."""

ALLOWED = (
    r"--log-[\w-]+-to-tensorboard",
    r"border(-[\w-]+)?\s*:",  # CSS
    r"border-(radius|collapse|color|bottom|top|left|right|spacing)",
    r"git worktree",
    r"\.tell\(",
    r"\.borders\.partial|\"borders\"",  # names of files
)
"""Text in which a retired word stands for something else."""
_ALLOWED = re.compile("|".join(ALLOWED))
_RETIRED = [(re.compile(rf"(?<![\w-])({pattern})(?![\w-])"), instead) for pattern, instead in RETIRED.items()]
_ANY = re.compile(rf"(?<![\w-])({'|'.join(RETIRED)})(?![\w-])")
_OPENING = re.compile(r"(Of|What|Whether|Whoever|Whichever|Those|Where)\b")
_QUOTED_OPENING = re.compile(rf"[\"'][\s\\]*{_OPENING.pattern}")
_COMMENT_OPENING = re.compile(rf"#[# ]*{_OPENING.pattern}")


def texts() -> dict[str, str]:
    """Every text file of the repository by its path, but for recorded files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return {
        str(path): (ROOT / path).read_text(encoding="utf-8")
        for path in paths
        if path.suffix in SUFFIXES
        and not str(path).startswith("tests/golden/")
        and str(path) != THIS_FILE
        and (ROOT / path).is_file()
    }


TEXTS = texts()


def retired_words(path: str, text: str) -> Iterator[str]:
    """Each retired word of a text, as a finding."""
    if not _ANY.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not _ANY.search(line):
            continue
        known = _ALLOWED.sub("", line)
        for pattern, instead in _RETIRED:
            found = pattern.search(known)
            if found:
                yield f"{path}:{number}: '{found[0]}': write {instead}"


def odd_openings(path: str, source: str) -> Iterator[str]:
    """Each docstring, field documentation and comment that opens with a relative clause, as a finding."""
    for node in ast.walk(ast.parse(source)) if _QUOTED_OPENING.search(source) else ():
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found = _OPENING.match(node.value.value.strip())
            if found:
                yield f"{path}:{node.lineno}: documentation opens with '{found[0]}'"
    if not _COMMENT_OPENING.search(source):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and _OPENING.match(token.string.lstrip("# ")):
            yield f"{path}:{token.start[0]}: a comment opens with '{token.string.split()[1]}'"


def test_no_retired_word_is_left() -> None:
    findings = [finding for path, text in TEXTS.items() for finding in retired_words(path, text)]
    assert not findings, f"{len(findings)} findings\n" + "\n".join(findings[:200])


def test_documentation_opens_with_a_noun_or_a_verb() -> None:
    findings = [
        finding
        for path, text in TEXTS.items()
        if path.endswith(".py") and not path.startswith("tests/")
        for finding in odd_openings(path, text)
    ]
    assert not findings, f"{len(findings)} findings\n" + "\n".join(findings[:200])


@pytest.mark.parametrize(
    "line",
    [
        "the rows that visitors bring",
        "main_dtype = torch.float32",
        "weights are published behind the step",
        "class Exchange:",
        "a step under way",
        "an own layer",
    ],
)
def test_a_retired_word_is_found(line: str) -> None:
    assert list(retired_words("x.md", line))


@pytest.mark.parametrize("line", ["dispatch tokens", "border-radius: 3px", "the domain of x", "fields"])
def test_other_words_are_left_alone(line: str) -> None:
    assert not list(retired_words("x.md", line))


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('"""What a rank finds."""', True),
        ("x = 1  # Of the last stage", True),
        ('x: int\n"""Of the samples."""', True),
        ('"""Offsets of samples."""', False),
        ('"""Return the loss."""', False),
    ],
)
def test_an_odd_opening_is_found(source: str, *, is_found: bool) -> None:
    assert bool(list(odd_openings("x.py", source))) == is_found
