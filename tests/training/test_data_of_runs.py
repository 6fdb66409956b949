"""Data of whole runs: longer runs, moved files, sets with separate losses, tokenizers that do not match the data."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from everyday import nightly
from metrics_files import logged_lines, logged_losses
from run_helpers import command_line

import pretrain
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.preprocess.flags import parse_settings
from megatrain.data.preprocess.run import preprocess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two datasets of ids below 99, each document ended by 99."""
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / "data" / name, "uint16") as writer:
            for _ in range(200):
                writer.add_document([[*random.integers(0, 99, random.integers(2, 40)), 99]])
    return tmp_path


def flags_of(folder: Path, **changed: str | None) -> list[str]:
    """A run of 6 iterations on a blend; None leaves a flag out, "" gives it without a value."""
    flags: dict[str, str | None] = {
        "--mock-data": None,
        "--data-path": f"0.7 {folder / 'data/a'} 0.3 {folder / 'data/b'}",
        "--split": "90,5,5",
        "--save": str(folder / "run"),
        "--load": str(folder / "run"),
        "--train-iters": "6",
        "--eval-interval": "3",
        "--eval-iters": "2",
        "--lr-decay-iters": "100",
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": "100",
    }
    return [word for part in command_line(flags, **changed) for word in part.split()]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of a run, without times."""
    kept = ("iteration", "lm_loss", "grad_norm", "validation", "loss")
    return [{name: line[name] for name in kept if name in line} for line in logged_lines(run)]


def test_a_longer_run_continues_with_unread_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(flags_of(folder)) == 0
    first = metrics(folder / "run")
    shutil.copytree(folder / "run", folder / "stopped")
    assert pretrain.main(flags_of(folder, train_iters="15")) == 0
    longer = metrics(folder / "run")
    assert longer[: len(first) - 1] == first[:-1]  # without the test loss, which comes last
    assert longer[-1]["iteration"] == 15
    assert "--train-iters 6 -> 15" in capsys.readouterr().out

    stopped = {"save": str(folder / "stopped"), "load": str(folder / "stopped"), "train_iters": "15"}
    for exit_interval in ("8", "11", None):
        assert pretrain.main(flags_of(folder, exit_interval=exit_interval, **stopped)) in (0, 75)
    assert metrics(folder / "stopped") == longer


def test_files_may_move_but_not_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(flags_of(folder)) == 0
    moved = f"0.7 {folder / 'moved/a'} 0.3 {folder / 'moved/b'}"
    shutil.move(folder / "data", folder / "moved")
    assert pretrain.main(flags_of(folder, data_path=moved, train_iters="7")) == 0
    swapped = f"0.7 {folder / 'moved/b'} 0.3 {folder / 'moved/a'}"
    capsys.readouterr()
    assert pretrain.main(flags_of(folder, data_path=swapped, train_iters="8")) == 2
    assert "moved/b is not the dataset that the checkpoint read" in capsys.readouterr().err


def test_validation_sets_are_evaluated_in_full_and_separately(folder: Path) -> None:
    separate = {
        "data_path": None,
        "split": None,
        "train_data_path": str(folder / "data/a"),
        "valid_data_path": f"{folder / 'data/a'} {folder / 'data/b'}",
        "full_validation": "",
        "multiple_validation_sets": "",
        "validation_set_names": "near far",
        "micro_batch_size": "8",
    }
    assert pretrain.main(flags_of(folder, **separate)) == 0
    found = [line for line in metrics(folder / "run") if "validation" in line]
    assert [(line["iteration"], line["validation"]) for line in found] == [
        (3, "near"),
        (3, "far"),
        (6, "near"),
        (6, "far"),
    ]

    at_the_end = {line["validation"]: line["loss"] for line in found[2:]}
    for label, name in (
        ("near", "a"),
        ("far", "b"),
    ):  # the same data alone, in the same number of samples as there are
        alone = separate | {"valid_data_path": str(folder / f"data/{name}"), "multiple_validation_sets": None}
        alone["validation_set_names"] = None
        again = {"save": None, "skip_train": "", "metrics_file": str(folder / f"{name}.jsonl")}
        assert pretrain.main(flags_of(folder, **alone, **again)) == 0
        (line,) = logged_lines(folder / f"{name}.jsonl")
        assert line["loss"] == at_the_end[label]


def test_the_micro_batch_of_an_evaluation_does_not_change_its_loss(folder: Path) -> None:
    found = {}
    for size in ("1", "4"):
        flags = {"micro_batch_size": "2", "eval_micro_batch_size": size, "save": None, "load": None}
        file = folder / f"{size}.jsonl"
        assert pretrain.main(flags_of(folder, **flags, global_batch_size="4", metrics_file=str(file))) == 0
        lines = logged_lines(file)
        found[size] = [line["loss"] for line in lines if "validation" in line or "test" in line]
    assert found["1"] == pytest.approx(found["4"], rel=1e-5)
    assert len(found["1"]) > 1


def test_the_cyclic_order_resumes_at_epoch_boundaries(folder: Path) -> None:
    cyclic = {
        "dataloader_type": "cyclic",
        "data_path": str(folder / "data/a"),
        "train_iters": "60",
        "eval_iters": "0",
    }
    assert pretrain.main(flags_of(folder, **cyclic)) == 0
    stopped = cyclic | {"save": str(folder / "stopped"), "load": str(folder / "stopped")}
    for exit_interval in ("23", "41", None):
        assert pretrain.main(flags_of(folder, exit_interval=exit_interval, **stopped)) in (0, 75)
    assert metrics(folder / "stopped") == metrics(folder / "run")


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (
            {"tokenizer_fingerprint": "f" * 64, "tokenizer_type": "GPT2BPETokenizer"},
            "made with another tokenizer",
        ),
        ({"largest_id": 100}, "id 100, outside the vocabulary of 100"),
        ({"largest_id": "many"}, "a.json: largest_id is 'many'"),
    ],
)
def test_a_description_is_compared_with_the_tokenizer(
    folder: Path, golden: Path, capsys: pytest.CaptureFixture[str], described: dict[str, Any], words: str
) -> None:
    (folder / "data/a.json").write_text(json.dumps(described))
    tokenizer: dict[str, str | None] = {}
    if "tokenizer_fingerprint" in described:
        tokenizer = {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(golden),
            "vocab_size": None,
        }
    assert pretrain.main(flags_of(folder, **tokenizer)) == 2
    assert words in capsys.readouterr().err


def test_attention_does_not_cross_documents(folder: Path) -> None:
    losses = {}
    for name in ("none", "reset_attention_mask", "dataloader_inter_document_masking"):
        run = {"save": None, "load": None, "metrics_file": str(folder / f"{name}.jsonl")}
        masks = {} if name == "none" else {name: ""}
        assert pretrain.main(flags_of(folder, **run, **masks)) == 0
        losses[name] = logged_losses(folder / f"{name}.jsonl")
    assert losses["reset_attention_mask"] != losses["none"]
    assert losses["reset_attention_mask"] == losses["dataloader_inter_document_masking"], (
        "each sequence is one document"
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"train_iters": "30", "eval_interval": "5", "start_eval_at_iter": "15"},
        nightly({"train_iters": "30", "start_eval_at_iter": "90"}),
        nightly({"train_iters": "12", "eval_interval": None}),
        {"skip_train": ""},
        nightly({"train_iters": "9", "eval_iters": "0"}),
    ],
    ids=" ".join,
)
def test_a_run_may_resume_with_other_evaluations(folder: Path, changed: dict[str, str | None]) -> None:
    often = {"train_iters": "10", "eval_interval": "1"}
    assert pretrain.main(flags_of(folder, **often)) == 0
    before = len(metrics(folder / "run"))
    assert pretrain.main(flags_of(folder, **often | changed)) == 0
    found = [line for line in metrics(folder / "run")[before:] if line.get("validation") == "valid"]
    assert bool(found) == (changed.get("eval_iters") != "0")
    assert all(line["loss"] > 1 for line in found)


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """A folder with tokenized conversations."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number} 1"},
                {"role": "assistant", "content": f"{number % 98} " * (number % 7 + 1)},
            ]
        }
        for number in range(90)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/talk --sft --sft-tokenizer-prompt-format identity"
    tokenizer = "--append-eod --tokenizer-type NullTokenizer --vocab-size 100"
    preprocess(parse_settings(f"{words} {tokenizer}".split()))
    return tmp_path


def test_a_run_on_conversations_resumes(talk: Path) -> None:
    changed: dict[str, str | None] = {"data_path": str(talk / "talk_messages_document"), "sft": ""}
    assert pretrain.main(flags_of(talk, **changed)) == 0
    stopped = changed | {"save": str(talk / "stopped"), "load": str(talk / "stopped")}
    for exit_interval in ("4", None):
        assert pretrain.main(flags_of(talk, exit_interval=exit_interval, **stopped)) in (0, 75)
    assert metrics(talk / "stopped") == metrics(talk / "run")


def test_documents_are_not_conversations(talk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (talk / "talk_messages_document_loss_mask.idx").unlink()
    changed: dict[str, str | None] = {"data_path": str(talk / "talk_messages_document"), "sft": ""}
    assert pretrain.main(flags_of(talk, **changed)) == 2
    assert "preprocess_data.py --sft" in capsys.readouterr().err


def test_a_run_reads_an_object_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same samples as from a folder; indices are in the local folder."""
    store = fsspec.filesystem("memory")
    for path in (folder / "data").iterdir():
        store.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    remote = {
        "data_path": "0.7 memory://bucket/a 0.3 memory://bucket/b",
        "save": str(folder / "remote"),
        "load": str(folder / "remote"),
    }
    try:
        assert pretrain.main(flags_of(folder, **remote)) == 2
        assert "add --object-storage-cache-path FOLDER" in capsys.readouterr().err
        remote |= {"object_storage_cache_path": str(folder / "cache")}
        assert pretrain.main(flags_of(folder, **remote)) == 0
    finally:
        store.rm("/bucket", recursive=True)
    assert len(list((folder / "cache").glob("*.idx"))) == 2
    assert pretrain.main(flags_of(folder)) == 0
    assert metrics(folder / "remote") == metrics(folder / "run")
