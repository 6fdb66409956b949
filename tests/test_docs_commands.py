"""Every command in README.md and docs/ runs as a reader would run it: after the quickstart, in the repository's folder.

    ```bash blocks   `$ ` lines of other blocks   `program argument` in sentences and tables

SMALLER shortens commands before they run, NOT_RUN lists commands that do not run; tests keep both short. Both run in
nightly runs; .ci/run runs the quickstart each time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}

SMALLER = {
    "--data-path runs/corpus_text_document --save runs/one": "--train-iters 3 --lr-warmup-iters 1 --eval-iters 1",
    "--pipeline-model-parallel-size 2 --save runs/eight --load runs/eight": "--train-iters 2 --lr-warmup-iters 1 --eval-iters 1",
    "--save runs/second --load runs/second": "--train-iters 12 --lr-warmup-iters 4 --eval-iters 1",
    "--save runs/third --load runs/third": "--train-iters 12 --lr-warmup-iters 4 --eval-iters 1",
    "python scripts/fault_bench.py": "--classes E C --count 2",
    "megatrain parity": "--layouts dp2 zero0",
    "--save runs/profiled --load runs/profiled": "--train-iters 12 --lr-warmup-iters 4 --eval-iters 1",
    "--config configs/quickstart_vision.yaml": "--train-iters 3 --lr-warmup-iters 1 --eval-iters 1",
    "--save runs/timed --load runs/timed": "--train-iters 2 --lr-warmup-iters 1 --eval-iters 1",
    "torchrun --nproc-per-node 4 pretrain.py": "--device cuda --dry-run",
}
"""Flags appended to these words. A run that needs GPUs is planned only."""

NOT_RUN = {
    "git clone": "its address is yet to be known",
    "bash scripts/quickstart.sh": "it has run before, on a smaller corpus and for fewer iterations",
    "bash scripts/test.sh": "it runs this test",
    "pytest --nightly tests/distributed/parity/test_parity_faults.py": "the tests plant every ninth fault, and all of them nightly",
    "pip install": "it needs a network",
    "python scripts/scale/data.py --documents 1000000000": "it writes 24 GB",
    "python scripts/soak.py": "it trains for half an hour",
    "bash runs/ladder/run.sh": "it trains nine models; tests/tools/test_ladder.py trains smaller ones",
    "megatrain ladder fit": "it needs these models",
    "python scripts/command_lines.py": "it rewrites its page",
}
"""Commands that begin with these words, and why."""

NEED_GPUS = (
    "bash scripts/gpu_check.sh",
    "python scripts/benchmark.py",
    "python scripts/benchmarks/",
    "torchrun --nproc-per-node 4 scripts/benchmarks/",
    "python scripts/compare_fp8.py",
    "python scripts/part_rates.py",
    "megatrain parity --device cuda",
)
"""Commands that start with these words need GPUs; those of benchmarks/ that do not take minutes."""

NEED_HOSTS = ("sbatch", "mpirun")
"""Commands whose launcher starts ranks on several hosts (tests/training/launch/test_launchers.py imitates it)."""


@dataclass(frozen=True)
class Example:
    command: str
    output: str = ""
    """The output that the page shows below the command."""


def examples(page: str) -> Iterator[Example]:
    """Yield the commands of a page, in order."""
    pattern = (
        r"^```bash\n(?P<block>.*?)^```|^```\n(?P<shell>\$ .*?)^```|^```.*?^```|(?<!`)`(?P<words>[^`\n]+)`"
    )
    for found in re.finditer(pattern, page, re.DOTALL | re.MULTILINE):
        if found["block"]:
            yield Example(found["block"])
        elif found["shell"]:
            command = re.match(r"\$ ((?:.*\\\n)*.*\n)", found["shell"])
            assert command
            yield Example(command[1], found["shell"][command.end() :])
        elif found["words"] and re.match(
            r"(python|torchrun|bash|pip|\./|scripts/\S+\.sh|\S*pretrain\.py|megatrain [a-z]+) [^|]+$",
            found["words"],
        ):
            is_name = re.fullmatch(
                r"megatrain [a-z]+ [a-z-]+", found["words"]
            )  # of a subcommand, without arguments
            if not is_name:
                yield Example(found["words"] + "\n")


def as_run(command: str) -> str:
    """Remove the commands that do not run, and shorten the others."""
    lines = [
        line
        for line in command.splitlines()
        if not line.startswith((*NOT_RUN, *NEED_GPUS, *NEED_HOSTS)) or is_another(line)
    ]
    text = "\n".join(lines) + "\n"
    for words, flags in SMALLER.items():
        text = text.replace(words, f"{words} {flags}")
    return text


def is_another(line: str) -> bool:
    """Return whether the line has a longer word than a command that does not run."""
    return any(
        re.match(re.escape(words) + r"(?<=\w)[-\w.]", line) for words in (*NOT_RUN, *NEED_GPUS, *NEED_HOSTS)
    )


class Checkout:
    """A copy of the repository after the quickstart, with this environment's programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("docs", "examples", "scripts", "pretrain.py", "preprocess_data.py", "pyproject.toml"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name, words in {
            "python": "",
            "megatrain": "-m megatrain.tools.main",
            "torchrun": "-m torch.distributed.run",
        }.items():
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            script.chmod(0o755)
        (programs / "python3").symlink_to("python")
        (programs / "activate").write_text(f"export PATH={programs}:$PATH\n")

    def run(self, commands: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRAIN")}
        environment |= {
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "PATH": f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "MEGATRAIN_PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.folder, env=environment, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, f"{commands}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, made_once: Callable[[str], None]) -> Checkout:
    """Run `scripts/quickstart.sh` on 2 MB of text for 24 iterations: all pages build on its output."""
    made_once("checkout")
    made = Checkout(tmp_path_factory.mktemp("checkout"))
    made.run("python scripts/quickstart/corpus.py --output runs/quickstart/corpus.jsonl --limit-mb 2")
    (made.folder / "configs").mkdir()
    config = (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    for words, fewer in {
        "train_iters: 240": "train_iters: 24",
        "lr_warmup_iters: 40": "lr_warmup_iters: 4",
        "eval_iters: 16": "eval_iters: 1",
        "save_interval: 100": "save_interval: 5",
    }.items():
        assert words in config
        config = config.replace(words, fewer)
    (made.folder / "configs" / "quickstart.yaml").write_text(config, encoding="utf-8")
    output = made.run("bash scripts/quickstart.sh")
    assert "killed with SIGKILL" in output
    assert "resumed from the last checkpoint" in output
    assert "What to look at next" in output
    (made.folder / "configs" / "quickstart.yaml").unlink()
    (made.folder / "configs").rmdir()
    (made.folder / "configs").symlink_to(ROOT / "configs")
    return made


@pytest.mark.nightly  # .ci/run runs it each time
def test_the_quickstart_works(checkout: Checkout) -> None:
    assert (checkout.folder / "runs" / "quickstart" / "complete").exists()


TEXT_OF_TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("runs/hf-text")
tokens = tokenizer("def __init__(self", return_tensors="pt")
model = AutoModelForCausalLM.from_pretrained("runs/hf-text")
whole = model.generate(**tokens, do_sample=False, max_new_tokens=24)
print(tokenizer.decode(whole[0, tokens["input_ids"].shape[1]:], skip_special_tokens=True), end="")
"""


@pytest.mark.nightly
def test_transformers_continues_a_prompt_as_the_quickstart_s_model_does(checkout: Checkout) -> None:
    pytest.importorskip("transformers")
    checkpoints = "runs/quickstart/checkpoints"
    checkout.run(f"megatrain convert megatrain-to-hf {checkpoints} runs/hf-text")
    greedy = '--prompt "def __init__(self" --temperature 0 --max-new-tokens 24 --json'
    found = json.loads(checkout.run(f"megatrain generate --load {checkpoints} {greedy}"))
    (checkout.folder / "text.py").write_text(TEXT_OF_TRANSFORMERS)
    assert checkout.run("python text.py") == found["text"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [name for name, path in PAGES.items() if list(examples(path.read_text(encoding="utf-8")))],
)
def test_the_commands_of_a_page_work(name: str, checkout: Checkout) -> None:
    page = PAGES[name].read_text(encoding="utf-8")
    printed: dict[str, str] = {}
    for file, program in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        (checkout.folder / file).write_text(program, encoding="utf-8")
    for example in examples(page):
        package = re.match(r"# needs the package (\w+)\n", example.command)
        command = as_run(example.command)
        if command.strip() and (package is None or find_spec(package[1]) is not None):
            printed[example.command] = checkout.run(command)
        if example.output:
            words_are_printed(example.output, printed[example.command])
    SHOWN.get(name, lambda *_: None)(page, list(printed.values()))


def words_are_printed(shown: str, printed: str) -> None:
    """Assert that each shown line starts with the first word of a printed line, apart from numbers: the corpus differs."""
    beginnings = {beginning(line) for line in printed.splitlines()}
    for line in shown.splitlines():
        if re.match(r" {0,2}\S", line) and line.strip() != "...":
            assert beginning(line) in beginnings, line


def beginning(line: str) -> str:
    return re.sub(r"[\d.,]+", "0", line.split(maxsplit=1)[0]) if line.strip() else ""


def start_is_printed(page: str, printed: list[str]) -> None:
    """Assert that the start shown on the page is printed, except lines that depend on the machine."""
    lines = {" ".join(line.split()) for line in printed[0].splitlines()}
    shown = page.split("## At start")[1].split("## Each", maxsplit=1)[0]
    changing = ("started in", "loss", "---", "settings have their defaults")
    for line in re.findall(r"^    (.*)$", shown, re.MULTILINE):
        assert any(word in line for word in changing) or " ".join(line.split()) in lines, line


def all_is_printed(page: str, printed: list[str]) -> None:
    """Assert that each indented line of the page is printed, apart from numbers and the function at the peak."""

    def words(line: str) -> str:
        return re.sub(r"\d[\d.,e+-]*", "0", re.sub(r", in \w+$", "", " ".join(line.split())))

    lines = {words(line) for text in printed for line in text.splitlines()}
    shown = re.findall(r"^    (.*)$", page, re.MULTILINE)
    assert len(shown) > 60
    assert [line for line in shown if words(line) not in lines] == []


SHOWN = {"docs/watching.md": start_is_printed, "docs/planning.md": all_is_printed}
"""Checks of outputs that a page shows apart from their commands."""


def test_little_is_left_out() -> None:
    """Few commands are skipped or shortened, and all of them are on a page."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES.values())
    assert [words for words in (*SMALLER, *NOT_RUN, *NEED_GPUS, *NEED_HOSTS) if words not in text] == []
    assert len(NOT_RUN) <= 10
    assert len(NEED_GPUS) <= 7
    assert len(NEED_HOSTS) <= 2
    assert len(SMALLER) <= 10


def test_commands_are_found() -> None:
    page = "a `python x.py --y` b `megatrain data` `megatrain a|b c`\n```bash\nA\n  B\n```\n```\n$ C \\\n  D\nE\n```\n```\nF\n```\n"
    assert list(examples(page)) == [
        Example("python x.py --y\n"),
        Example("A\n  B\n"),
        Example("C \\\n  D\n", "E\n"),
    ]
    number = sum(len(list(examples(path.read_text(encoding="utf-8")))) for path in PAGES.values())
    assert number >= 20
