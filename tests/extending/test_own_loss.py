"""--loss: the example of docs/extending.md gives the same losses under every layout, and errors name the function."""

from pathlib import Path

import pytest
import torch
from everyday import only
from user_files import LAYOUTS, losses, train, write_example

from megatrain.config import ConfigError
from megatrain.config.user_function import UserFunction
from megatrain.model.user_loss import UserLoss


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("alone")
    return losses(folder / "run", f"--mock-data --loss {write_example(folder, 'my_loss.py')}:focal")


@pytest.mark.parametrize("layout", only(("tp2", "cp2"), LAYOUTS))
def test_every_layout_trains_with_the_loss(tmp_path: Path, layout: str, alone: dict[str, float]) -> None:
    flags = f"--mock-data --loss {write_example(tmp_path, 'my_loss.py')}:focal {LAYOUTS[layout]}"
    assert losses(tmp_path / "run", flags, 2) == pytest.approx(alone, rel=1e-5)


def test_the_logged_loss_is_that_of_the_function(tmp_path: Path, alone: dict[str, float]) -> None:
    plain = losses(tmp_path / "plain", "--mock-data")
    assert alone["train 1"] < plain["train 1"]
    twice = tmp_path / "twice.py"
    twice.write_text("def f(inputs): return 2 * inputs.cross_entropy\n")
    double = losses(tmp_path / "double", f"--mock-data --loss {twice}:f")
    assert double["train 1"] == pytest.approx(2 * plain["train 1"], rel=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("inputs.cross_entropy - inputs.cross_entropy.mean()", "gives a token another loss among other tokens"),
        ("inputs.cross_entropy / inputs.cross_entropy.detach().max()", "gives a token another loss among other"),
        ("inputs.cross_entropy * torch.rand(1)", "differs when it is called again"),
        ("inputs.cross_entropy.sum()", r"returned shape \[\], not losses \[32\]"),
        ("inputs.cross_entropy.detach()", r"returned losses without a gradient, not"),
        ("1.0", "returned float, not losses"),
        ("(lambda x, y: x)(inputs)", r"TypeError: .* argument: 'y' \(.*mine.py:2\)"),
        ("inputs.logits", r"AttributeError: 'LossInputs' object has no attribute 'logits' \(.*mine.py:2\)"),
    ],
)  # fmt: skip
def test_a_loss_that_layouts_would_change_is_refused(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(f"import torch\ndef f(inputs): return {body}\n")
    with pytest.raises(ConfigError, match=rf"--loss .*mine.py:f: .*{words}[\s\S]*fix: "):
        UserLoss(UserFunction(str(tmp_path / "mine.py"), "f", "--loss"), 101, torch.device("cpu"))


def test_the_plan_reports_an_error_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_like_this\n")
    output = train(tmp_path / "run", f"--mock-data --loss {tmp_path}/mine.py:f", exit_code=2)
    assert "cannot be imported: ModuleNotFoundError" in output
    assert "mine.py:1)" in output
