"""--eval-tasks during a run: training is not changed, all logs have the scores, and a checkpoint scores the same without the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_files import logged_lines, logged_steps
from run_helpers import command_line
from tiny_tokenizers import gpt2_files

import pretrain
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tasks import requests
from megatrain.data.tasks.files import read_tasks
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.tools.main import main
from megatrain.tools.report_data import read_run

ROWS = {
    "animals": [
        {"query": "The quick brown", "choices": ["fox", "dog", "lazy cat"], "gold": 0},
        {"query": "the lazy dog", "choices": ["sleeps", "does not sleep"], "gold": 1},
        {"query": "", "choices": ["a fox", "the"], "gold": 0},
        {"query": "the fox " * 40, "choices": ["runs", "does not"], "gold": 0},
    ],
    "cloze": [{"query": "the fox", "target": "does not"}, {"query": "THE DOG ", "target": "SLEEPS"}],
}


def steps(file: Path) -> list[Any]:
    return [(line["lm_loss"], line["grad_norm"]) for line in logged_steps(file)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "tasks").mkdir()
    for name, rows in ROWS.items():
        (folder / "tasks" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> dict[str, str]:
    vocab, merges = gpt2_files(folder)
    return {"--tokenizer-type": "GPT2BPETokenizer", "--vocab-file": vocab, "--merge-file": merges}


@pytest.fixture(scope="module")
def run(folder: Path, tokenizer: dict[str, str]) -> Path:
    """A run of six iterations with tasks after every second one."""
    words = {
        **tokenizer, "--vocab-size": None, "--seq-length": "64", "--hidden-dropout": "0.1", "--train-iters": "6", "--eval-interval": "3", "--eval-iters": "1",
        "--num-layers": "2", "--save-interval": "3", "--micro-batch-size": "2",
    }  # fmt: skip
    tasks = {
        "--eval-tasks": f"{folder}/tasks",
        "--eval-tasks-interval": "2",
        "--tensorboard-dir": f"{folder}/curves",
    }
    assert pretrain.main(command_line({**words, **tasks, "--save": f"{folder}/run"})) == 0
    assert pretrain.main(command_line({**words, "--metrics-file": f"{folder}/plain.jsonl"})) == 0
    resumed = {
        **words,
        **tasks,
        "--tensorboard-dir": None,
        "--load": f"{folder}/run/iter_0000003",
        "--metrics-file": f"{folder}/resumed.jsonl",
    }
    assert pretrain.main(command_line(resumed)) == 0
    return folder / "run"


def test_training_is_not_changed_and_all_logs_have_the_scores(folder: Path, run: Path) -> None:
    assert steps(run / "metrics.jsonl") == steps(folder / "plain.jsonl")
    found = [
        (line["iteration"], line["validation"], line)
        for line in logged_lines(run / "metrics.jsonl")
        if "validation" in line
    ]
    assert [key for *key, _ in found] == [
        [2, "animals"], [2, "cloze"], [3, "valid"], [4, "animals"], [4, "cloze"], [6, "valid"], [6, "test"], [6, "animals"], [6, "cloze"],
    ]  # fmt: skip
    resumed = [
        line
        for line in logged_lines(folder / "resumed.jsonl")
        if line["iteration"] > 3 and "validation" in line
    ]
    assert resumed == [line for iteration, _, line in found if iteration > 3]
    assert found[0][2].keys() == {"iteration", "validation", "accuracy", "accuracy_norm", "log_likelihood"}
    data = read_run(run, "run")
    assert [at for at, _ in data.accuracies["animals norm"]] == [2, 4, 6]
    assert [at for at, _ in data.bits["valid"]] == [3, 6]
    valid = found[2][2]
    assert valid["bits_per_byte"] == pytest.approx(
        valid["loss"] / 0.6931471805599453 / bytes_per_token(folder), rel=0.5
    )
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = accumulator.EventAccumulator(str(folder / "curves"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("accuracy task-animals")] == [2, 4, 6]


def test_the_documents_of_a_run_are_tokenized_once(
    folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, tokenized = requests.requests_of, []
    monkeypatch.setattr(requests, "requests_of", lambda *given: tokenized.append(given) or tokenize(*given))
    requests.requests_of_run.cache_clear()
    words = f"--eval-only --load {run} --eval-tasks {folder}/tasks --metrics-file {folder}/once.jsonl --device cpu"
    assert pretrain.main(words.split()) == 0
    assert len(tokenized) == 1


def bytes_per_token(folder: Path) -> float:
    """Return the mean over the vocabulary, which mock data draws from."""
    pieces = json.loads((folder / "vocab.json").read_text())
    return sum(len(piece) for piece in pieces if piece != "<|endoftext|>") / len(pieces)


def test_a_checkpoint_scores_as_its_run_and_as_transformers(
    folder: Path, run: Path, tokenizer: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    last = {line["validation"]: line for line in logged_lines(run / "metrics.jsonl") if "accuracy" in line}
    assert (
        main(["evaluate", "--load", str(run), "--tasks", f"{folder}/tasks", "--json", "--batch-size", "2"])
        == 0
    )
    scores = {line.pop("task"): line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for name, values in scores.items():
        assert values == pytest.approx({key: last[name][key] for key in values}, rel=1e-6)
    words = {
        "--eval-only": "",
        "--load": str(run),
        "--eval-tasks": f"{folder}/tasks/cloze.jsonl",
        "--metrics-file": f"{folder}/only.jsonl",
    }
    assert (
        pretrain.main(
            [word for name, value in words.items() for word in (name, value) if word] + ["--device", "cpu"]
        )
        == 0
    )
    (only,) = [line for line in logged_lines(folder / "only.jsonl") if "accuracy" in line]
    assert only == last["cloze"]
    assert main(["convert", "megatrain-to-hf", str(run), str(folder / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    encode = load_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=tokenizer["--vocab-file"],
            merge_file=tokenizer["--merge-file"],
        )
    )
    for task in read_tasks([f"{folder}/tasks"]):
        expected = score_with_transformers(model, encode, task)
        assert {key: last[task.name][key] for key in expected} == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def score_with_transformers(model: Any, tokenizer: Any, task: Any) -> dict[str, float]:
    """Score a task as lm-evaluation-harness does (api/model.py and models/huggingface.py of 0.4)."""
    hits, norm_hits, golds = [], [], []
    for document in task.documents:
        sums, greedy = [], []
        for answer in document.answers:
            context = document.context.rstrip()
            whole, start = tokenizer.encode(document.context + " " + answer), tokenizer.encode(context)
            whole, start = (whole, start) if start else ([tokenizer.eod, *whole], [tokenizer.eod])
            scored, inputs = whole[len(start) :], whole[:-1][-64:]
            log_probs = model(torch.tensor([inputs])).logits[0, -len(scored) :].double().log_softmax(-1)
            sums.append(float(log_probs[range(len(scored)), scored].sum()))
            greedy.append(log_probs.argmax(-1).tolist() == scored)
        golds.append(sums[document.gold])
        if len(sums) == 1:
            hits.append(greedy[0])
            continue
        norms = [x / len(answer) for x, answer in zip(sums, document.answers, strict=True)]
        hits.append(sums.index(max(sums)) == document.gold)
        norm_hits.append(norms.index(max(norms)) == document.gold)
    found = {"accuracy": hits, "log_likelihood": golds, **({"accuracy_norm": norm_hits} if norm_hits else {})}
    return {name: sum(values) / len(values) for name, values in found.items()}


def test_a_task_that_cannot_be_read_is_an_error_before_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"--eval-tasks": f"{folder}/none.jsonl"}
    assert pretrain.main(command_line(flags)) == 2
    assert "none.jsonl: there is no such file or folder\n  fix: name a .jsonl" in capsys.readouterr().err
    assert pretrain.main(command_line({"--eval-tasks": f"{folder}/tasks"})) == 2
    assert "NullTokenizer reads numbers" in capsys.readouterr().err
