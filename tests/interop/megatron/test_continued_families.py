"""Runs of BERT, T5, models with delta nets and vision-language models that Megatron-LM began continue here: its checkpoints of iteration 8 give the recorded iterations 9 to 12.

From the flags of the recorded runs, with their corpus and tokenizer: samples continue where the checkpoint says.
"""

import json
import tarfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from metrics_files import assert_near_recorded, logged_steps

from megatrain.config import ConfigError, parse
from megatrain.config.schema.data import MASKED_FAMILIES
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.images.vectors import MockImages
from megatrain.data.samples import build
from megatrain.data.samples.mock import MockSequences
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.tools.main import main
from megatrain.training.launch import facts
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

LOSS, NORM = 1e-6, 2e-6
ROWS: Final = {
    "bert": 256, "t5": 352, "qwen3next": 256, "gdn": 256, "mamba": 256, "nemotron": 256, "llava": 256
}  # fmt: skip
"""Rows of the vocabulary's tensors, padding included."""
FOLDERS: Final = {
    "bert": ("bert", "bert"),
    "t5": ("t5", "t5"),
    "qwen3next": ("gdn", "gpt"),
    "gdn": ("gdn", "hybrid"),
    "mamba": ("hybrid", "hybrid"),
    "nemotron": ("hybrid", "hybrid"),
    "llava": ("vlm", "vlm"),
}
"""Folder of the recordings, and family of the model."""


@pytest.fixture(params=ROWS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def theirs(family: str, families: Path, tmp_path: Path) -> Path:
    """The folder of the recorded checkpoint."""
    with tarfile.open(families / FOLDERS[family][0] / f"{family}.ckpt.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / f"{family}.ckpt"


@pytest.fixture(autouse=True)
def recorded_mock_data(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give mock data the ids of the recorded tokenizer, and sample k the random image of the recorded run."""

    def images(self: MockImages, k: int) -> npt.NDArray[np.float32]:
        return np.random.RandomState(1000 + k).standard_normal(self.image_shape).astype(np.float32)

    def of_tokenizer(**_: int) -> MockSequences:
        return MockSequences(vocab_size=250, eod=249)

    if family == "llava":
        monkeypatch.setattr(MockImages, "images", images)
        monkeypatch.setattr(build, "MockSequences", of_tokenizer)


@pytest.fixture
def softmax_over_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count rows of padding as tokens of the model, as Megatron-LM does; samples have the tokenizer's."""

    def padded(config: TokenizerConfig) -> Tokenizer:
        tokenizer = load_tokenizer(config)
        tokenizer.vocab_size = ROWS[family]
        return tokenizer

    monkeypatch.setattr(facts, "load_tokenizer", padded)


def continue_run(families: Path, family: str, load: Path, tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    """Train from the checkpoint to iteration 12, and return the lines of the metrics file with a loss."""
    folder, model_family = FOLDERS[family]
    flags = json.loads((families / folder / "flags.json").read_text())[family]
    words = [word.replace("{sentences}", str(families / "sentences")) for word in flags]
    words += f"--model-family {model_family} --transformer-impl local --device cpu --allow-pickle".split()
    words += (
        f"--data-cache-path {tmp_path}/cache --metrics-file {tmp_path}/metrics.jsonl --load {load}".split()
    )
    words += more
    with joined_ranks(parse(words), Phases(Console())) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        assert trainer.train() == 0
    return logged_steps(tmp_path)


def recorded_lines(families: Path, family: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = json.loads(
        (families / FOLDERS[family][0] / f"{family}.resumed.json").read_text()
    )
    return lines


def assert_recorded(found: list[dict[str, Any]], families: Path, family: str) -> None:
    expected = recorded_lines(families, family)
    assert_near_recorded(found, expected, loss=LOSS, norm=NORM)
    for ours, recorded in zip(found, expected, strict=True):
        if family == "bert":
            assert ours["sop_loss"] == pytest.approx(recorded["sop loss"], rel=LOSS, abs=0)
        for depth in range(1, 3 if family == "nemotron" else 1):
            name = f"mtp_{depth} loss"
            assert ours["mtp_losses"][name] == pytest.approx(recorded[name], rel=LOSS, abs=0)


@pytest.mark.usefixtures("softmax_over_padding", "whole_mock_data")
def test_a_run_continues_with_the_recorded_digits(
    family: str, families: Path, theirs: Path, tmp_path: Path
) -> None:
    assert_recorded(continue_run(families, family, theirs, tmp_path), families, family)


@pytest.mark.usefixtures("softmax_over_padding", "whole_mock_data")
def test_a_converted_run_continues_with_the_recorded_digits(
    family: str, families: Path, theirs: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "ours"
    words = ["--vocab-size", str(ROWS[family])]
    assert main(["convert", "megatron-to-megatrain", "--allow-pickle", str(theirs), str(ours), *words]) == 0
    assert_recorded(continue_run(families, family, ours, tmp_path, *words), families, family)


@pytest.mark.usefixtures("softmax_over_padding", "whole_mock_data")
def test_states_of_the_optimizer_are_above_the_bounds(
    family: str, families: Path, theirs: Path, tmp_path: Path
) -> None:
    last = continue_run(families, family, theirs, tmp_path, "--no-load-optim")[-1]
    recorded = recorded_lines(families, family)[-1]
    assert last["iteration"] == recorded["iteration"]
    assert last["lm_loss"] != pytest.approx(recorded["lm loss"], rel=LOSS, abs=0)
    assert last["grad_norm"] != pytest.approx(recorded["grad_norm"], rel=NORM, abs=0)


@pytest.mark.parametrize("family", MASKED_FAMILIES, indirect=True)
def test_vocab_size_counts_the_rows_of_padding(
    family: str, families: Path, theirs: Path, tmp_path: Path
) -> None:
    """Their tokenizers have files, which say another size."""
    words = ["--vocab-size", str(ROWS[family])]
    assert_recorded(continue_run(families, family, theirs, tmp_path, *words), families, family)


@pytest.mark.parametrize("family", ["t5"], indirect=True)
def test_the_text_of_a_checkpoint_is_that_of_its_conversion(
    families: Path,
    theirs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its vocabulary has more rows than the tokenizer has tokens. The tokenizer's path is relative."""
    monkeypatch.chdir(families)
    ours = tmp_path / "ours"
    assert main(["convert", "megatron-to-megatrain", "--allow-pickle", str(theirs), str(ours)]) == 0
    words = ["--prompt", "The <extra_id_0> end", "--temperature", "0", "--max-new-tokens", "8", "--json"]
    found = []
    for source in (theirs, ours):
        capsys.readouterr()
        assert main(["generate", "--load", str(source), *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["tokens"])
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_rows_of_padding_are_left_out_for_the_tokens_of_the_tokenizer(
    family: str, families: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer tokens share the probability: each loss is a little smaller."""
    found = continue_run(families, family, theirs, tmp_path)
    assert "rows of padding are left out" in " ".join(capsys.readouterr().out.split())
    for ours, recorded in zip(found, recorded_lines(families, family), strict=True):
        assert 0.98 * recorded["lm loss"] < ours["lm_loss"] < recorded["lm loss"]


def test_another_family_is_refused(family: str, families: Path, theirs: Path, tmp_path: Path) -> None:
    if FOLDERS[family][1] == "gpt":
        pytest.skip("other families refuse its flags")
    with pytest.raises(
        ConfigError, match=f"--model-family .* the checkpoint has {FOLDERS[family][1]}, this run gpt"
    ):
        continue_run(families, family, theirs, tmp_path, "--model-family", "gpt")
