"""examples/train_loop.py: every layout gives the losses of one process, and a loop resumes from a checkpoint of its own."""

import re
import textwrap
from pathlib import Path

import pytest
from everyday import nightly
from forked_job import ForkedJob

from megatrain.config.user_function import UserFunction

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_loop.py"


def losses(folder: Path, num_ranks: int, flags: str = "") -> dict[str, float]:
    """Run the example; return the losses that it prints, by iteration, and that of validation."""
    main = UserFunction(str(EXAMPLE), "main", "").load()
    job = ForkedJob([*"--device cpu --train-iters 8".split(), *flags.split()], num_ranks, folder, main=main)
    job.wait()
    assert set(job.exit_codes.values()) == {0}, job.output(0)
    return {name: float(loss) for name, loss in re.findall(r"(.+): loss ([\d.]+)", job.output(0))}


@pytest.mark.parametrize(
    ("split", "num_ranks"),
    [
        ("--tensor-model-parallel-size 2", 2),
        nightly("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4),
    ],
)
@pytest.mark.nightly
def test_the_loop_gives_the_same_losses_under_every_layout(
    tmp_path: Path, split: str, num_ranks: int
) -> None:
    save = f"--save {tmp_path / 'save'}"
    alone = losses(tmp_path, 1)
    assert list(alone) == [*(f"iteration {number}" for number in range(1, 9)), "validation"]
    assert alone["iteration 8"] < 0.95 * alone["iteration 1"]
    first = losses(tmp_path, num_ranks, f"{split} --train-iters 4 {save}")
    del first["validation"]
    rest = losses(tmp_path, num_ranks, f"--context-parallel-size 2 --load {tmp_path / 'save'}")
    assert first | rest == pytest.approx(alone, rel=1e-5)


def test_the_page_quotes_the_example() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    (quote,) = re.findall(r"```python\n(with joined_ranks.*?)```", page, re.DOTALL)
    assert textwrap.indent(quote, "    ") in EXAMPLE.read_text()


def test_the_example_is_short() -> None:
    """A reader sees the loop without scrolling: it stays one screen."""
    text = EXAMPLE.read_text()
    assert len(text[text.index("def train(") : text.index("def main(")].splitlines()) < 25
