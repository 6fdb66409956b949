"""A problem with the tokenizer is reported once: by the parser, a rule, or the loading of its files."""

from __future__ import annotations

import json

import pytest

from megatrain.config import ConfigError, Problem, parse, resolve
from megatrain.config.environment import LaunchEnvironment
from megatrain.training.launch.facts import gather_facts

RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr 1e-3 --micro-batch-size 1"
    " --train-iters 2 --mock-data --swiglu --normalization RMSNorm --position-embedding-type rope --device cpu"
    " --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
)


def problems(flags: str) -> tuple[Problem, ...]:
    request = parse(f"{RUN} {flags}".split())
    with pytest.raises(ConfigError) as error:
        resolve(request, gather_facts(request, LaunchEnvironment()))
    return error.value.problems


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tokenizer-type HuggingFaceTokenizer", "is given without --tokenizer-model"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v.json", "is given without --merge-file"),
        ("--tokenizer-type NullTokenizer --vocab-size 9 --merge-file m", "--merge-file m is not read by"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere.json",
            "nowhere.json: there is no such file",
        ),
        ("--tokenizer-type HugingFaceTokenizer --tokenizer-model x", "did you mean HuggingFaceTokenizer?"),
        ("--tokenizer-type NullTokenizer --vocab-size many", "--vocab-size many is not a whole number"),
        ("--tokenizer-type NullTokenizer --vocab-size 0", "--vocab-size 0 must be at least 1"),
        ("--tokenizer-type MultimodalTokenizer --tokenizer-model x", "MultimodalTokenizer"),
        ("--vocab-file v", "add --tokenizer-type GPT2BPETokenizer"),
        ("", "there is no tokenizer"),
    ],
)
def test_each_problem_is_reported_once(flags: str, words: str) -> None:
    (problem,) = problems(flags)
    assert words in str(problem)


def test_a_size_that_contradicts_the_file_is_reported_once(golden) -> None:
    flags = (
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {golden / 'tokenizer.json'} --vocab-size 9"
    )
    (problem,) = problems(flags)
    assert "--vocab-size 9" in problem.text
    assert "3000" in problem.text
    assert "leave --vocab-size out" in problem.fix


def test_a_tokenizer_without_an_end_loads_until_the_end_is_needed(golden, tmp_path) -> None:
    text = (golden / "tokenizer.json").read_text().replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(text)
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    errors = [str(problem) for problem in problems(f"{flags} --eod-mask-loss")]
    assert len(errors) == 2, "the loss mask, and the made-up data of this run"
    assert "--eod-mask-loss needs an end-of-document token" in errors[0]
    assert str(tmp_path) in errors[0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|nothing|>"}))
    request = parse(f"{RUN} {flags} --eod-mask-loss".split())
    plan = resolve(request, gather_facts(request, LaunchEnvironment()))
    assert plan.derived.eod_id == 0
