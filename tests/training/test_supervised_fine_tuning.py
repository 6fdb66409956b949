"""Supervised fine-tuning from conversations in JSON Lines to a resumed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data_of_runs import flags_of, metrics

import pretrain
from megatrain.data.preprocess.flags import parse_settings
from megatrain.data.preprocess.run import preprocess


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


def test_a_run_on_conversations_resumes(folder: Path) -> None:
    changed: dict[str, str | None] = {"data_path": str(folder / "talk_messages_document"), "sft": ""}
    assert pretrain.main(flags_of(folder, **changed)) == 0
    stopped = changed | {"save": str(folder / "stopped"), "load": str(folder / "stopped")}
    for exit_interval in ("4", None):
        assert pretrain.main(flags_of(folder, exit_interval=exit_interval, **stopped)) in (0, 75)
    assert metrics(folder / "stopped") == metrics(folder / "run")


def test_documents_are_not_conversations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "talk_messages_document_loss_mask.idx").unlink()
    changed: dict[str, str | None] = {"data_path": str(folder / "talk_messages_document"), "sft": ""}
    assert pretrain.main(flags_of(folder, **changed)) == 2
    assert "preprocess_data.py --sft" in capsys.readouterr().err
