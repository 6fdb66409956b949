"""--callbacks: the example of docs/extending.md is called on all ranks, and an error in it names its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from metrics_files import logged_losses
from user_files import LAYOUTS, MODEL, train, write_example

from megatrain.config import Facts, StoredRun, parse, resolve


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_ranks_are_called_in_order(tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = f"--mock-data --callbacks {write_example(tmp_path, 'my_callbacks.py')}:Recorder --save {save}"
    train(tmp_path / "run", f"{flags} --save-interval 4 {LAYOUTS['pp2']}", 2)
    first, second = (events(save / f"events-{rank}.jsonl") for rank in (0, 1))
    assert [event["event"] for event in first] == [
        *("start", *["iteration"] * 3, "evaluation", "iteration", "save", *["iteration"] * 2),
        *("evaluation", "evaluation", "save", "end"),
    ]
    assert first == second
    assert logged_losses(save) == [event["loss"] for event in first if event["event"] == "iteration"]
    assert first[-1]["exit_code"] == 0


@pytest.mark.parametrize(
    ("text", "words", "exit_code"),
    [
        ("def on_step(self): pass", "has on_step, which is never called\n  fix: define methods", 2),
        ("def other(self): pass", "has no method that is called", 2),
        ("def on_start(self, iteration): 1 / 0", "ZeroDivisionError: division by zero (", 2),
        ("def on_iteration(self, metrics): metrics['nothing']", "KeyError: 'nothing' (", 1),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, words: str, exit_code: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"class Mine:\n    def __init__(self, run): pass\n    {text}\n")
    output = train(tmp_path / "run", f"--mock-data --callbacks {file}:Mine", exit_code=exit_code)
    assert words in output
    assert ("mine.py:3)" in output) == ("Error" in words)


def test_a_changed_file_is_a_note_on_resume() -> None:
    """It changes nothing that is trained."""
    request = parse(f"{MODEL} --mock-data --callbacks a.py:A --load c".split())
    before, now = (
        Facts(digests={"logging.callbacks": digest}, vocab_size=101, eod_id=100) for digest in "12"
    )
    stored = StoredRun(
        path="c", iteration=1, consumed_train_samples=8, config=resolve(request, before).config.to_dict()
    )
    notes = resolve(request, Facts(**{**vars(now), "checkpoint": stored})).notes
    assert any("--callbacks-digest 1 -> 2" in note for note in notes)
