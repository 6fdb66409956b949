"""`megatrain generate`: prompts, sampling, stop words, streams and wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest

import pretrain
from megatrain.tools.main import main

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 24 --tokenizer-type NullTokenizer --vocab-size 29"
    " --mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --device cpu --position-embedding-type rope --eval-iters 0"
    " --hidden-dropout 0 --attention-dropout 0 --window-size 5,0 --init-method-std 0.3"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("run")
    assert pretrain.main([*FLAGS, "--save", str(made)]) == 0
    return str(made)


class Command:
    """Runs the command on one checkpoint."""

    def __init__(self, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str, exit_code: int = 0) -> str:
        self.capsys.readouterr()
        assert main(["generate", "--load", self.folder, *words]) == exit_code
        printed = self.capsys.readouterr()
        return printed.err if exit_code else printed.out

    def objects(self, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*words, "--json").splitlines()]


@pytest.fixture
def command(folder: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(folder, capsys)


PROMPTS = ["5 3", "1", "7 8 9 10 11 12 13 14 15"]


def test_texts_do_not_depend_on_other_prompts(command: Command, tmp_path: Path) -> None:
    flags = ("--max-new-tokens", "12", "--seed", "4", "--top-p", "0.9", "--log-probs", "2")
    together = command.objects("--prompt", *PROMPTS, *flags)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    assert command.objects("--prompt-file", str(file), *flags) == together
    few = command.objects("--prompt", *PROMPTS, *flags, "--max-sequences", "1")
    for number, (prompt, one) in enumerate(zip(PROMPTS, together, strict=True)):
        (alone,) = command.objects("--prompt", prompt, *flags[:2], "--seed", str(4 + number), *flags[4:])
        for other in (alone, few[number]):
            assert (other["text"], other["tokens"], other["finish_reason"]) == (
                one["text"],
                one["tokens"],
                one["finish_reason"],
            )
        assert len(one["log_probs"]) == len(one["tokens"])
        assert all(len(each["top"]) == 2 for each in one["log_probs"])


def test_text_is_printed_after_its_prompt(command: Command) -> None:
    flags = ("--max-new-tokens", "6", "--temperature", "0")
    expected = command.objects("--prompt", *PROMPTS, *flags)
    assert f"\n{PROMPTS[0]}{expected[0]['text']}\n" in command("--prompt", PROMPTS[0], *flags)
    shown = command("--prompt", *PROMPTS, *flags)
    assert all(f"{one['prompt']}{one['text']}\n" in shown for one in expected)
    assert "> cache of " in shown
    assert "tokens/s" in shown


def test_a_stop_word_ends_the_text_across_tokens(command: Command) -> None:
    flags = ("--max-new-tokens", "12", "--temperature", "0", "--prompt", "5 3")
    (whole,) = command.objects(*flags)
    words = whole["text"].split()
    stop = f"{words[3][-1]} {words[4][0]}"
    (one,) = command.objects(*flags, "--stop-words", "none", stop)
    assert one["text"] == whole["text"][: whole["text"].index(stop)]
    assert one["finish_reason"] == "stop"
    assert len(one["tokens"]) <= 5


def test_the_termination_id_ends_the_text(command: Command) -> None:
    flags = ("--max-new-tokens", "12", "--temperature", "0", "--prompt", "5 3")
    (whole,) = command.objects(*flags)
    end = whole["tokens"][2]
    (one,) = command.objects(*flags, "--termination-id", str(end))
    assert one["tokens"] == whole["tokens"][: whole["tokens"].index(end) + 1]
    assert one["finish_reason"] == "stop"


def test_the_context_ends_a_text(command: Command) -> None:
    out = command("--prompt", "5 3", "1 2 3", "--max-new-tokens", "1000", "--termination-id", "28")
    assert "2 of 2 prompts: the context of 24 tokens ends the text" in out
    (one,) = command.objects("--prompt", " ".join("1" * 24), "--max-new-tokens", "5")
    assert len(one["tokens"]) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--prompt", "five"], "--prompt 'five'"),
        (["--prompt", "29"], "29 is outside the vocabulary of 29"),
        (["--prompt", " ".join("1" * 25)], "has 25 tokens, and the model's context 24"),
        (["--prompt", "1", "--top-p", "2"], "--top-p: 2.0 is no possible value"),
        (["--prompt", "1", "--temperature", "-1"], "--temperature"),
        (["--prompt", "1", "--stop-words", ""], "--stop-words"),
        (["--prompt", "1", "--log-probs", "1000"], "--log-probs"),
        (["--prompt", "1", "--termination-id", "29"], "--termination-id 29: the vocabulary has ids 0 to 28"),
        (["--prompt", "1", "--cache-gb", "0"], "--cache-gb 0 "),
        (["--prompt", "1", "--cache-gb", "1e-9"], "needs a cache of"),
        (["--prompt", "1", "--max-sequences", "0"], "--max-sequences 0"),
        (["--prompt-file", "missing.jsonl"], "missing.jsonl"),
    ],
    ids=str,
)
def test_wrong_input_is_named(command: Command, words: list[str], named: str) -> None:
    message = command(*words, exit_code=2)
    assert named in message
    assert "fix:" in message


@pytest.mark.parametrize("line", ["1 2", '{"text": "1"}', '{"prompt": 1}', "[", '{"prompt": "1"} {}'])
def test_a_wrong_line_of_a_prompt_file_is_named(command: Command, line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{line}\n")
    assert f"{file}:1: not an object with a prompt" in command("--prompt-file", str(file), exit_code=2)


def test_only_a_line_feed_ends_a_line_of_a_prompt_file(command: Command, tmp_path: Path) -> None:
    lines = [{"prompt": "5 6", "note": "a\u2028b\u2029c\u0085d"}, {"prompt": "7"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    found = command.objects("--prompt-file", str(file), "--max-new-tokens", "2")
    assert [one["prompt"] for one in found] == ["5 6", "7"]


def test_a_prompt_file_without_prompts_is_named(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    assert f"{file}: has no prompts" in command("--prompt-file", str(file), exit_code=2)
