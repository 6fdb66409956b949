"""Text in the data flags: the dataset is that of preprocess_data.py, byte by byte, made once, and errors name the line."""

from __future__ import annotations

import functools
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_job import ForkedJob
from preprocessing import InlineWorkers

import pretrain
from megatrain.config import parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.data.preprocess import raw_text
from megatrain.data.preprocess.flags import parse_settings
from megatrain.data.preprocess.run import preprocess
from megatrain.training.launch.facts import gather_facts

RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --micro-batch-size 1"
    " --global-batch-size 4 --swiglu --normalization RMSNorm --position-embedding-type rope --device cpu"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --ffn-hidden-size 32 --train-iters 2 --eval-iters 0"
)
NULL = "--tokenizer-type NullTokenizer --vocab-size 100"


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of JSON Lines, and a folder with a compressed one and a text file; ranks tokenize without worker processes."""
    monkeypatch.setattr(raw_text, "preprocess", functools.partial(preprocess, workers_type=InlineWorkers))
    lines = [json.dumps({"text": " ".join(str((7 * n + k) % 98) for k in range(n % 40))}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "more").mkdir()
    (tmp_path / "more/b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[::-1]).encode()))
    (tmp_path / "more/c.txt").write_text("3 4 5 " * 200)
    return tmp_path


def flags_of(folder: Path, *names: str, **changed: str) -> list[str]:
    paths = " ".join(str(folder / name) for name in names)
    more = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())
    return f"{RUN} {NULL} --data-path {paths} --save {folder / 'run'} {more}".split()


def facts_of(flags: list[str], **options: Any) -> Any:
    return gather_facts(parse(flags), LaunchEnvironment(), **options)


def test_the_dataset_is_that_of_preprocess_data(texts: Path) -> None:
    datasets = facts_of(flags_of(texts, "a.jsonl", "more"), tokenizes=True).datasets
    for name, dataset in zip(("a.jsonl", "more"), datasets, strict=True):
        words = f"--input {texts / name} --output-prefix {texts / name}-ours --append-eod {NULL}"
        preprocess(parse_settings(words.split()), workers_type=InlineWorkers)
        assert re.fullmatch(rf"{texts}/\.tokenized/{name}-[0-9a-f]{{12}}_text_document", dataset.prefix)
        for suffix in ("bin", "idx"):
            expected = (texts / f"{name}-ours_text_document.{suffix}").read_bytes()
            assert Path(f"{dataset.prefix}.{suffix}").read_bytes() == expected


def test_ranks_share_what_one_of_them_tokenizes(texts: Path) -> None:
    flags = flags_of(texts, "a.jsonl", "more")
    job = ForkedJob(flags, 2, texts)
    job.wait()
    assert job.exit_codes == {0: 0, 1: 0}, job.output(0)
    assert [job.output(rank).count("tokenizing ") for rank in (0, 1)] == [2, 0], "a line for each dataset"
    assert len(list((texts / ".tokenized").glob("*.idx"))) == 2
    files = {path: path.stat().st_mtime_ns for path in (texts / ".tokenized").glob("*.bin")}
    assert pretrain.main([*flags, "--load", str(texts / "run")]) == 0
    assert files == {path: path.stat().st_mtime_ns for path in (texts / ".tokenized").glob("*.bin")}


def test_other_text_and_other_tokenizers_have_other_datasets(texts: Path) -> None:
    (first,) = facts_of(flags_of(texts, "a.jsonl"), tokenizes=True).datasets
    assert not facts_of(flags_of(texts, "a.jsonl")).untokenized
    assert facts_of(flags_of(texts, "a.jsonl", vocab_size="101")).untokenized
    with (texts / "a.jsonl").open("a") as file:
        file.write('\n{"text": "1 2 3"}')
    (second,) = facts_of(flags_of(texts, "a.jsonl"), tokenizes=True).datasets
    assert second.num_tokens == first.num_tokens + 4


def test_a_dry_run_names_the_text_and_tokenizes_nothing(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(texts, "0.5", "a.jsonl", "0.5", "more")
    flags = [word.replace(f"{texts}/0.5", "0.5") for word in flags]
    assert pretrain.main([*flags, "--dry-run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"{texts}/more (2 files, 0.0 MB) is tokenized at the first start" in output
    assert not (texts / ".tokenized").exists()


def test_a_dry_run_lists_the_text_of_each_split(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*flags_of(texts, "a.jsonl", eval_iters="1"), "--valid-data-path", str(texts / "more")]
    flags[flags.index("--data-path")] = "--train-data-path"
    assert pretrain.main([*flags, "--dry-run"]) == 0
    rows = re.findall(r"^  (train|valid|test) +\S+  (.*)$", capsys.readouterr().out, re.MULTILINE)
    names = [(split, Path(name.split(" (")[0]).name) for split, name in rows]
    assert names == [("train", "a.jsonl"), ("valid", "more")]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gone.json"},
            "gone.json: there is no such file",
        ),
        ({"eval_tasks": "gone"}, "gone: there is no such file or folder"),
    ],
)
def test_problems_of_tokenizer_and_tasks_are_the_only_ones_of_text(
    texts: Path, changed: dict[str, str], reason: str
) -> None:
    flags = flags_of(texts, "a.jsonl", **changed)
    if "tokenizer_type" in changed:
        flags = [word for word in flags if word not in NULL.split()]
        flags += ["--tokenizer-type", "HuggingFaceTokenizer"]
    (problem,) = facts_of(flags, tokenizes=True).data_problems
    assert reason in problem.text


CASES = {
    "bad lines": ("a.jsonl", {}, r"error: {texts}/a\.jsonl:2: .*\n  {texts}/a\.jsonl:3: blank.*\n  {texts}/a\.jsonl:5: .*\n  3 bad lines in all"),
    "missing": ("gone.jsonl", {}, r"error: {texts}/gone\.jsonl: there is no such file\n  fix: .*"),
    "empty folder": ("empty", {}, r"error: {texts}/empty: is a folder without a file of \.jsonl"),
    "cache among the text": (
        "more", {"data_cache_path": "{texts}/more/cache"}, r"error: --data-cache-path .* lies in {texts}/more,"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_errors_come_before_the_run(texts: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    (texts / "empty").mkdir()
    (texts / "a.jsonl").write_text('{"text": "1"}\n{"text" "2"}\n\n{"text": ""}\n{"txt": "4"}\n')
    name, changed, pattern = CASES[case]
    changed = {key: value.format(texts=texts) for key, value in changed.items()}
    assert pretrain.main(flags_of(texts, name, **changed)) == 2
    assert re.match(pattern.format(texts=texts), re.split(r"processes: \d+\n", capsys.readouterr().err)[-1])


@pytest.mark.nightly
def test_a_second_run_waits_for_the_first(texts: Path) -> None:
    """Two runs that start at the same time on the same text: the second finds what the first writes."""
    jobs = []
    for name in ("one", "two"):
        (texts / name).mkdir()
        jobs.append(ForkedJob(flags_of(texts, "a.jsonl", save=str(texts / name / "run")), 1, texts / name))
    for job in jobs:
        job.wait()
        assert job.exit_codes == {0: 0}, job.output(0)
    assert len(list((texts / ".tokenized").glob("*.bin"))) == 1
