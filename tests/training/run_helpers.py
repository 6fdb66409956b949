"""Command lines of a tiny run on a CPU, and other helpers of tests that start pretrain.py."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY_RUN = {
    "--num-layers": "4", "--hidden-size": "32", "--num-attention-heads": "4", "--normalization": "RMSNorm",
    "--swiglu": "", "--position-embedding-type": "rope", "--disable-bias-linear": "", "--hidden-dropout": "0",
    "--attention-dropout": "0", "--seq-length": "16", "--tokenizer-type": "NullTokenizer", "--vocab-size": "101",
    "--mock-data": "", "--micro-batch-size": "1", "--train-iters": "2", "--lr": "1e-3", "--eval-iters": "0",
    "--device": "cpu",
}  # fmt: skip

LIMIT_SECONDS = 300
"""Time that a test grants a run on a loaded machine, where a start alone may take a minute; it is reached by failures only."""


def command_line(changed: dict[str, str | None], **by_name: str | None) -> list[str]:
    """Return the flags of the tiny run with changes: None removes a flag, "" gives it without a value.

    Args:
        by_name: more changes, by names such as `train_iters`.
    """
    named = {f"--{name.replace('_', '-')}": value for name, value in by_name.items()}
    flags = {name: value for name, value in {**TINY_RUN, **changed, **named}.items() if value is not None}
    return [word for name, value in flags.items() for word in ([name, *value.split()] if value else [name])]


@contextmanager
def started(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process that is killed at the end: a test that fails would wait for it for ever."""
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, *, lines: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not get {lines} lines")
