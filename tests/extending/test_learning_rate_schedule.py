"""--lr-decay-style my_schedule.py:cubic, the example of docs/training.md: trained on two ranks, planned, resumed and changed."""

import re
from pathlib import Path

import pytest
from forked_job import ForkedJob
from metrics_files import logged_steps
from user_files import write_example

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer"
    " --vocab-size 101 --mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-4 --decoupled-lr 2e-3"
    " --lr-warmup-iters 1 --lr-decay-iters 5 --eval-iters 0 --log-interval 1 --device cpu --position-embedding-type rope"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The example of the page in a file."""
    return write_example(tmp_path, "my_schedule.py")


def run(folder: Path, flags: str, *, num_ranks: int = 1) -> tuple[int, str]:
    """Return the exit code of all ranks and the output of rank 0."""
    job = ForkedJob([*RUN.split(), *flags.split()], num_ranks, folder)
    job.wait()
    (exit_code,) = set(job.exit_codes.values())
    return exit_code, job.output(0)


def rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in logged_steps(folder)]


def test_a_schedule_in_a_file_of_the_user_s_own(tmp_path: Path, file: Path) -> None:
    save = tmp_path / "run"
    mine = f"--lr-decay-style {file}:cubic --save {save} --load {save}"
    expected = [0.0, *(1e-4 + 9e-4 * (1 - left / 4) ** 3 for left in range(5))]
    exit_code, text = run(tmp_path, f"{mine} --train-iters 3 --load-or-start", num_ranks=2)
    assert exit_code == 0, text
    assert rates(save) == pytest.approx(expected[:3], rel=1e-12)

    exit_code, text = run(tmp_path, f"{mine} --train-iters 6 --dry-run")
    assert exit_code == 0
    assert re.search(r"6 +10 +0\.0001 +2  decay ends", text), text

    text_of_run = file.read_text()
    file.write_text(text_of_run.replace("** 3", "** 2"))
    exit_code, text = run(tmp_path, f"{mine} --train-iters 6")
    assert exit_code == 2
    assert f"--lr-decay-style {file}:cubic: the file has changed" in text
    assert "or add --override-opt-param-scheduler to run the changed file" in text
    accepted = f"{mine} --train-iters 6 --override-opt-param-scheduler --dry-run"
    assert run(tmp_path, accepted)[0] == 0

    file.write_text(text_of_run)
    assert run(tmp_path, f"{mine} --train-iters 6")[0] == 0
    assert rates(save) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero ({file}:2)"),
        ("return float('nan')", "returned nan after"),
        ("return None", "returned None after"),
        ("return 'fast'", "returned 'fast' after"),
    ],
)
def test_an_error_of_the_function_is_reported_before_the_start(tmp_path: Path, body: str, named: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(f"def decay(samples, schedule):\n    {body}\n")
    exit_code, text = run(tmp_path, f"--lr-decay-style {file}:decay --train-iters 6", num_ranks=2)
    assert exit_code == 2
    assert f"--lr-decay-style {file}:decay" in text
    assert named.format(file=file) in text
    assert "fix: " in text


def test_a_missing_file_is_reported_before_the_start(tmp_path: Path) -> None:
    exit_code, text = run(tmp_path, f"--lr-decay-style {tmp_path}/none.py:decay --train-iters 6")
    assert exit_code == 2
    assert "FileNotFoundError" in text
