"""--dataset: the example of docs/extending.md trains from the command line; layouts and restarts read the same samples."""

from pathlib import Path

import pytest
from user_files import LAYOUTS, losses, train, write_example


def test_layouts_and_restarts_read_the_same_samples(tmp_path: Path) -> None:
    file = write_example(tmp_path, "my_dataset.py")
    flags, save = f"--dataset {file}:triples", tmp_path / "save"
    alone = losses(tmp_path / "alone", flags)
    assert list(alone) == [
        *("train 1", "train 2", "train 3", "valid 3"),
        *("train 4", "train 5", "train 6", "valid 6", "test 6"),
    ]
    train(tmp_path / "first", f"{flags} --save {save} --exit-interval 4", 2, exit_code=75)
    again = f"{flags} {LAYOUTS['pp2']} --save {save} --load {save}"
    split = losses(tmp_path / "split", again, 2)
    assert split == pytest.approx({name: loss for name, loss in alone.items() if int(name[-1]) > 4}, rel=1e-5)
    file.write_text(f"{file.read_text()}# changed\n")
    assert "has changed" in train(tmp_path / "changed", again, exit_code=2)
    assert "--dataset cannot change on resume, since the order of samples" in train(
        tmp_path / "removed", f"--mock-data --load {save}", exit_code=2
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_ranks_with_other_samples_are_reported(tmp_path: Path, split: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"import os\ndef f(request):\n    other = int(os.environ['RANK']) if request.split == {split!r} else 0\n"
        "    return [[other] * 17] * (request.num_samples or 1)\n"
    )
    output = train(tmp_path / "run", f"--dataset {file}:f", 2, exit_code=2)
    assert "rank 1 has other samples than rank 0\n  fix: compute sample k from k" in output
