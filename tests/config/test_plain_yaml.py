"""YAML of strangers is refused in little time, with a message that can be printed, by every reader of YAML."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.config import parse
from megatrain.config.errors import ConfigError
from megatrain.config.module_precision import PrecisionFileError, matchers_of
from megatrain.config.plain_yaml import load_yaml
from megatrain.data.samples.data_schedule import read_data_schedule
from megatrain.tools.main import main
from megatrain.tools.report_data import _settings  # the reader of config.yaml


def chain(first: str, of_two: str) -> str:
    """Return anchors that each use the one before twice."""
    return f"a0: &a0 {first}\n" + "".join(
        f"a{i + 1}: &a{i + 1} {of_two}\n".replace("$", f"*a{i}") for i in range(40)
    )


HOSTILE = {
    "lists of lists": chain("[x]", "[$, $]"),
    "mappings of mappings": chain("{k: v}", "{k: $, m: $}"),
    "merged mappings": chain("{k: v}", "{<<: [$, $]}"),
    "a wide list in wide lists": "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 400)}]\n" for i in range(4)
    ),
    "a list in itself": "a: &a [*a]\n",
    "a mapping in itself": "a: &a\n  b: *a\n",
    "deep lists": "[" * 200 + "]" * 200,
    "deeper lists": "[" * 20_000,
    "a number of base 60": "model:\n  num_layers: 1" + ":1" * 20_000 + "\n",
    "a fraction of base 60": "model:\n  lr: 1" + ":1" * 2000 + ".0\n",
    "many digits": "model:\n  num_layers: " + "9" * 20_000 + "\n",
    "half of a pair": 'checkpoint:\n  save: "\\ud800x"\n',
    "half of a pair as a name": 'model:\n  "\\udfff": 1\n',
    "half of a pair in a list": 'data:\n  data_path: ["\\udcff"]\n',
    "a large file": "a: " + "x" * (1 << 21),
}


def config(file: Path) -> str:
    return "".join(map(str, parse(["--config", str(file)]).problems))


def megatron_config(file: Path) -> str:
    return "".join(map(str, parse(["--yaml-cfg", str(file)]).problems))


def precision(file: Path) -> str:
    with pytest.raises(PrecisionFileError) as caught:
        matchers_of(file.read_text())
    return str(caught.value)


def schedule(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_data_schedule(str(file))
    return str(caught.value)


def report(file: Path) -> str:
    return str(_settings(file)[1] or "")


@pytest.mark.parametrize("read", [config, megatron_config, precision, schedule, report])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused(name: str, read: Callable[[Path], str], tmp_path: Path) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(HOSTILE[name])
    start = time.process_time()
    problem = read(file)
    assert time.process_time() - start < 10
    assert 0 < len(problem) < 1000
    problem.encode()


def test_anchors_and_merges_are_read() -> None:
    text = "a: &a {x: 1, y: [2.5, true]}\nb:\n  <<: *a\n  x: 3\nc: [*a, null, 0x10, 1:30]\n"
    a = {"x": 1, "y": [2.5, True]}
    assert load_yaml(text) == {"a": a, "b": {"x": 3, "y": [2.5, True]}, "c": [a, None, 16, 90]}
    assert load_yaml("") is None


def test_words_that_are_not_utf8_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    (problem,) = parse(["--save", "runs/\udcff"]).problems
    assert problem.text.endswith("is not UTF-8")
    assert main(["checkpoint", "ls", "runs/\udcff"]) == 2
    assert "'runs/\\udcff' is not UTF-8" in capsys.readouterr().err
