"""The commands of docs/watching.md, run as a reader would after the quickstart."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
PREPARATION = """
python scripts/quickstart_corpus.py --output runs/quickstart/corpus.jsonl --limit-mb 2
python scripts/quickstart_tokenizer.py --input runs/quickstart/corpus.jsonl --output runs/quickstart/tokenizer.json
mkdir -p runs/quickstart/data
python preprocess_data.py --input runs/quickstart/corpus.jsonl --json-keys text --append-eod --workers 1 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model runs/quickstart/tokenizer.json --output-prefix runs/quickstart/data/stdlib
"""


def in_folder(folder: Path, commands: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout after the quickstart, with `python` and `megatrain` as this environment's."""
    made = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "scripts", "pretrain.py", "preprocess_data.py"):
        (made / name).symlink_to(ROOT / name)
    (made / "bin").mkdir()
    for name, words in (
        ("python", sys.executable),
        ("megatrain", f"{sys.executable} -m megatrain.tools.main"),
    ):
        script = made / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o755)
    in_folder(made, PREPARATION)
    return made


def test_the_commands_of_the_page_work(folder: Path) -> None:
    outputs = {}
    for command in COMMANDS:
        package = re.match(r"# needs the package (\w+)\n", command)
        if package is None or find_spec(package.group(1)) is not None:
            outputs[command] = in_folder(folder, command)
    assert len(outputs) >= 4
    # What the page shows of the start is what is printed, but for what the next setting or another machine changes.
    printed = {" ".join(line.split()) for line in outputs[COMMANDS[0]].splitlines()}
    shown = PAGE.split("## At start")[1].split("## Each")[0]
    changing = ("started in", "loss", "---", "settings have their defaults")
    for line in re.findall(r"^    (.*)$", shown, re.MULTILINE):
        assert any(word in line for word in changing) or " ".join(line.split()) in printed, line
    assert (folder / "runs" / "report.html").is_file()
