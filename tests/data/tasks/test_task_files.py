"""Files of tasks: JSON lines and the YAML of lm-evaluation-harness; errors name the file and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatrain.config.errors import InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tasks.files import Document, read_tasks
from megatrain.data.tasks.requests import (
    Request,
    Score,
    batch_of,
    encode_pairs,
    requests_of,
    rounds,
    task_metrics,
)
from megatrain.data.tokenizers.build import load_tokenizer

CHOICE = {"query": "1 2", "choices": ["3", "4 5"], "gold": 1}
CLOZE = {"query": "1 2", "target": "3"}
YAML: dict[str, Any] = {
    "task": "letters", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "data/rows.jsonl"}}, "test_split": "test",
    "output_type": "multiple_choice", "doc_to_text": "{{text}} ->", "doc_to_choice": "{{[a, b]}}", "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
ROW = {"text": "x", "a": "p", "b": "q", "answer": 1}


def write_lines(file: Path, *rows: Any) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def write_yaml(folder: Path, **changed: Any) -> str:
    write_lines(folder / "data" / "rows.jsonl", ROW)
    settings = {key: value for key, value in {**YAML, **changed}.items() if value is not None}
    (folder / "letters.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "letters.yaml")


def test_a_folder_has_tasks_of_both_forms(tmp_path: Path) -> None:
    write_lines(tmp_path / "choices.jsonl", CHOICE, {**CHOICE, "gold": "3"})
    write_lines(tmp_path / "cloze.jsonl", CLOZE)
    write_yaml(tmp_path, dataset_kwargs={"data_files": {"test": "rows.jsonl"}})
    write_lines(tmp_path / "rows.jsonl", ROW)
    choices, cloze, letters = read_tasks([str(tmp_path)])
    assert [one.name for one in (choices, cloze, letters)] == ["choices", "cloze", "letters"]
    assert choices.documents == (Document("1 2", ("3", "4 5"), 1), Document("1 2", ("3", "4 5"), 0))
    assert (choices.has_choices, cloze.has_choices) == (True, False)
    assert letters.documents == (Document("x ->", ("p", "q"), 1),)
    assert len(read_tasks([str(tmp_path / "choices.jsonl")], limit=1)[0].documents) == 1


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"doc_to_choice": ["yes", "no"], "doc_to_target": 0}, Document("x ->", ("yes", "no"), 0)),
        ({"doc_to_text": "text", "doc_to_target": "answer", "description": "Say:\n"}, Document("Say:\nx", ("p", "q"), 1)),
        ({"doc_to_target": "{{b}}"}, Document("x ->", ("p", "q"), 1)),
        ({"output_type": "loglikelihood", "doc_to_target": "a", "doc_to_choice": None}, Document("x ->", ("p",))),
    ],
)  # fmt: skip
def test_fields_and_templates_have_the_meaning_of_the_harness(
    tmp_path: Path, changed: dict[str, Any], expected: Document
) -> None:
    (task,) = read_tasks([write_yaml(tmp_path, **changed)])
    assert task.documents == (expected,)


def test_a_file_may_include_another(tmp_path: Path) -> None:
    write_yaml(tmp_path)
    (tmp_path / "mine.yml").write_text("include: letters.yaml\ntask: mine\ntarget_delimiter: ''\n")
    (task,) = read_tasks([str(tmp_path / "mine.yml")])
    assert (task.name, task.delimiter, len(task.documents)) == ("mine", "", 1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"query": "1"}], "line 1: .*: it has no choices, gold; its keys are query\n"),
        ([{"target": "1"}], "line 1: .*: it has no query; its keys are target\n"),
        ([{**CHOICE, "gold": "other"}], "the right answer 'other' is none of the 2 choices"),
        ([{**CHOICE, "choices": "ab"}], "the choices 'ab' are no list"),
        ([CHOICE, {**CHOICE, "gold": 2}], "line 2: .*the right answer 2 is none of the 2 choices"),
        ([{**CHOICE, "gold": True}], "the right answer True is none"),
        ([{**CHOICE, "choices": ["a"], "gold": 0}], "none of the 1 choices"),
        ([{**CHOICE, "query": 3}], "3 is no text"),
        ([CHOICE, CLOZE], "mixes multiple choice and cloze"),
        ([[1]], "is no JSON object"),
        ([], "has no documents"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as error:
        read_tasks([write_lines(tmp_path / "rows.jsonl", *rows)])
    assert error.value.problems[0].fix


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dataset_path": "allenai/sciq"}, "dataset_path allenai/sciq is no local file"),
        ({"dataset_kwargs": ["rows.jsonl"]}, "dataset_path json is no local file"),
        ({"dataset_kwargs": {"data_files": {"test": 3}}}, "data_files is 3, no name of a file"),
        ({"dataset_kwargs": {"data_files": {"test": []}}}, r"data_files is \[\], no name of a file"),
        ({"dataset_kwargs": {"data_files": "x" * 5000}}, "cannot be read: .*name too long"),
        ({"dataset_kwargs": {"data_files": "\ud800"}}, "cannot be read: .*surrogates"),
        ({"test_split": ["a"]}, r"no split \['a'\]"),
        ({"test_split": None}, "no split train"),
        ({"output_type": "generate_until"}, "output_type generate_until is not scored"),
        ({"num_fewshot": 5}, "num_fewshot 5"),
        ({"process_docs": "x"}, "process_docs is code"),
        ({"doc_to_choice": None}, "has no doc_to_choice"),
        ({"doc_to_text": "{{missing}}"}, "UndefinedError: 'missing' is undefined"),
        ({"doc_to_text": "{{text.__class__.__mro__}}"}, "SecurityError"),
        ({"doc_to_text": "{% if %}"}, "TemplateSyntaxError"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as error:
        read_tasks([write_yaml(tmp_path, **changed)])
    assert error.value.problems[0].fix


def test_code_missing_files_and_equal_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "code.yaml").write_text("doc_to_text: !function utils.text\n")
    for name, expected in {
        "code.yaml": "could not determine a constructor",
        "none": "there is no such file",
    }.items():
        with pytest.raises(InputError, match=expected):
            read_tasks([str(tmp_path / name)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no file of a task"):
        read_tasks([str(tmp_path / "empty")])
    file = write_lines(tmp_path / "one.jsonl", CLOZE)
    with pytest.raises(InputError, match="two tasks have the name one"):
        read_tasks([file, file])


def test_answers_are_tokenized_with_their_contexts() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10))
    found = encode_pairs([("1 2", " 3 4"), ("1 2  ", "3"), ("", "5 6")], tokenizer)
    assert found == [Request((1, 2, 3, 4), 2), Request((1, 2, 3), 1), Request((9, 5, 6), 2)]


def test_micro_batches_have_similar_lengths_and_lose_the_first_tokens() -> None:
    requests = [Request(tuple(range(1, n + 1)), 2) for n in (5, 700, 130, 128, 3, 300)]
    found = [
        (one.length, one.microbatches)
        for one in rounds(requests, max_length=512, batch_size=2, per_round=2, divisor=2)
    ]
    assert found == [(512, ((1, 5),)), (256, ((2, 3),)), (128, ((0, 4),))]
    batch = batch_of([requests[1], requests[0]], length=512, size=3, device=torch.device("cpu"))
    assert batch.tokens[0, :2].tolist() == [700 - 512, 701 - 512]
    assert batch.loss_mask.nonzero().tolist() == [[0, 510], [0, 511], [1, 2], [1, 3]]
    assert batch.labels[batch.loss_mask > 0].tolist() == [699, 700, 4, 5]


def test_metrics_follow_from_scores(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / "a.jsonl", CHOICE, CHOICE), write_lines(tmp_path / "b.jsonl", CLOZE)]
    tasks = read_tasks(files)
    scores = [
        Score(-2.0, False),
        Score(-3.0, True),
        Score(-4.0, False),
        Score(-3.0, False),
        Score(-1.0, True),
    ]
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10))
    assert len(requests_of(tasks, tokenizer)) == len(scores)
    assert task_metrics(tasks, scores) == {
        "a": {"accuracy": 0.5, "accuracy_norm": 1.0, "log_likelihood": -3.0},  # 4 5 has three characters
        "b": {"accuracy": 1.0, "log_likelihood": -1.0},
    }
