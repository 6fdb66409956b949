"""200 mutants of a folder of transformers: each is refused with one sentence and exit code 2, and nothing in it is executed."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everyday import nightly
from hand_made_folders import LLAMA, made, write_folder

from megatrain.tools.main import main

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()
ROUNDS = 10
Mutation = Callable[[Path, random.Random], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(function: Mutation) -> Mutation:
    MUTATIONS[function.__name__] = function
    return function


class Bomb:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def change_header(folder: Path, r: random.Random, change: Callable[[dict[str, Any], str], None]) -> None:
    file = folder / r.choice(SHARDS)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header, r.choice(sorted(set(header) - {"__metadata__"})))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@mutation
def missing_shard(folder: Path, r: random.Random) -> None:
    (folder / r.choice((*SHARDS, INDEX, "config.json"))).unlink()


@mutation
def truncated_file(folder: Path, r: random.Random) -> None:
    file = folder / r.choice((*SHARDS, INDEX, "config.json"))
    os.truncate(file, r.randrange(file.stat().st_size))


@mutation
def longer_file(folder: Path, r: random.Random) -> None:
    with (folder / r.choice((*SHARDS, INDEX, "config.json"))).open("ab") as file:
        file.write(b"\x01" * r.randrange(1, 5000))


@mutation
def wrong_vocabulary(folder: Path, r: random.Random) -> None:
    size = LLAMA["vocab_size"]
    change_config(
        folder, vocab_size=r.choice([0, -1, 1, size - 1, size + 1, 1 << 40, None, "23", 23.5, [size]])
    )


@mutation
def unknown_architecture(folder: Path, r: random.Random) -> None:
    text = "".join(chr(r.randrange(1, 500)) for _ in range(r.randrange(1, 3000)))
    names = ["LlamaForCausalLM2", "__import__('os').system('x')", "BertModel", text, "\x1b[31mred", "", 7]
    change_config(folder, architectures=r.choice([[r.choice(names)], None, {}, [["LlamaForCausalLM"]]]))


@mutation
def absurd_size_in_config(folder: Path, r: random.Random) -> None:
    wrong = [0, -1, 1 << 31, 1 << 62, 10**30, 1e308, -0.5, "16", True, [], {}, "9" * 5000, [[[[[[]]]]]]]
    change_config(folder, **{r.choice(SIZES): r.choice(wrong)})


@mutation
def absurd_sizes_together(folder: Path, r: random.Random) -> None:
    """Sizes that fit each other, with terabytes of tensors."""
    size = 1 << r.randrange(17, 31)
    change_config(folder, hidden_size=size, num_attention_heads=4, intermediate_size=size, vocab_size=size)


@mutation
def absurd_shape_in_header(folder: Path, r: random.Random) -> None:
    shapes = [[1 << 40, 1 << 40], [-1, 16], [0], [1 << 50], [1] * 100, ["16", 16], [16.0], None, [[16, 16]]]
    change_header(folder, r, lambda header, name: header[name].update(shape=r.choice(shapes)))


@mutation
def absurd_range_in_header(folder: Path, r: random.Random) -> None:
    ranges = [[0, 1 << 60], [1 << 60, 0], [-8, 8], [0], [], None, ["0", "8"], [0, 8, 16], [1e300, 2]]
    change_header(folder, r, lambda header, name: header[name].update(data_offsets=r.choice(ranges)))


@mutation
def unknown_dtype(folder: Path, r: random.Random) -> None:
    names = ["I64", "F8_E4M3", "U8", "BOOL", "float32", "f32", "", None, 7, "x" * 5000]
    change_header(folder, r, lambda header, name: header[name].update(dtype=r.choice(names)))


@mutation
def hostile_header(folder: Path, r: random.Random) -> None:
    texts = [b"[" * 100_000, b"{}", b"null", b'{"a":' * 5000, b"\xff" * 64, b'{"a": {}}', b"{" * 64, b'"x"']
    text = r.choice(texts)
    (folder / r.choice(SHARDS)).write_bytes(len(text).to_bytes(8, "little") + text)


@mutation
def hostile_length_of_header(folder: Path, r: random.Random) -> None:
    length = r.choice([1 << 63, (1 << 64) - 1, 1 << 40, 100_000_001, 1 << 31, 99_999_999])
    with (folder / r.choice(SHARDS)).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))


@mutation
def index_that_leaves_the_folder(folder: Path, r: random.Random) -> None:
    names = ["../theirs/" + SHARDS[0], "/etc/passwd", "/dev/zero", "a/" + SHARDS[0], "..", "", "\0", "x" * 5000,
             SHARDS[0] + "\n", "con\u202efig.safetensors", ".hidden.safetensors"]  # fmt: skip
    change_index(folder, lambda names_of: names_of.update({r.choice(sorted(names_of)): r.choice(names)}))


@mutation
def index_with_wrong_tensors(folder: Path, r: random.Random) -> None:
    def change(files: dict[str, Any]) -> None:
        name = r.choice(sorted(files))
        file = files.pop(name)
        if r.random() < 0.5:
            files[f"{name}x"] = file
        elif r.random() < 0.5:
            files[name] = SHARDS[file == SHARDS[0]]

    change_index(folder, change)


@mutation
def index_that_is_none(folder: Path, r: random.Random) -> None:
    texts = ["[]", "{}", '{"weight_map": 7}', '{"weight_map": {"a": {"b": 1}}}', "{" * 10_000, '{"weight_map": null}',
             '{"weight_map": {}}', '"\\ud800"', "NaN", '{"weight_map": {"a": ["b"]}}']  # fmt: skip
    (folder / INDEX).write_text(r.choice(texts))


@mutation
def config_that_is_none(folder: Path, r: random.Random) -> None:
    texts = ["[]", "7", "{", "{" * 10_000, '{"a":' * 10_000, "", "\0", '"\\ud800"', "null", "[" * 500_000]
    (folder / "config.json").write_text(r.choice(texts))


@mutation
def code_or_other_formats(folder: Path, r: random.Random) -> None:
    changes = [
        {"auto_map": {"AutoModelForCausalLM": "bomb.Bomb"}},
        {"auto_map": "bomb.py"},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "__class__", "factor": 2.0}},
        {"hidden_act": "relu"},
    ]
    (folder / "bomb.py").write_text(f"import os; os.mkdir({str(folder.parent / 'executed')!r})")
    change_config(folder, **r.choice(changes))


@mutation
def pickle_in_place_of_a_shard(folder: Path, r: random.Random) -> None:
    data = pickle.dumps(Bomb(folder.parent / "executed"), protocol=r.randrange(2, 6))
    name = r.choice([*SHARDS, "pytorch_model.bin", "config.json", INDEX])
    if name == "pytorch_model.bin":
        for file in (*SHARDS, INDEX):
            (folder / file).unlink()
    (folder / name).write_bytes(data)


@mutation
def no_regular_file(folder: Path, r: random.Random) -> None:
    path = folder / r.choice((*SHARDS, INDEX, "config.json"))
    path.unlink()
    kind = r.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == 2 else "/etc/passwd")


@mutation
def other_tensors(folder: Path, r: random.Random) -> None:
    def change(header: dict[str, Any], name: str) -> None:
        other = f"{name}{r.choice(['x', '.0', '/../y', chr(27) + '[2J'])}"
        header[other] = header.pop(name)

    change_header(folder, r, change)
    (folder / INDEX).unlink()
    (folder / r.choice(SHARDS)).rename(folder / "model.safetensors")


@pytest.mark.parametrize("rounds", [range(2), nightly(range(2, ROUNDS))], ids=len)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutant_is_refused_with_one_sentence(
    name: str, rounds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(MUTATIONS) * ROUNDS == 200
    whole = write_folder(tmp_path / "whole", made("llama"), LLAMA, num_files=2)
    for number in rounds:
        folder = Path(shutil.copytree(whole, tmp_path / "theirs"))
        MUTATIONS[name](folder, random.Random(f"{name} {number}"))
        exit_code = main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "ours")])
        output, text = capsys.readouterr()
        assert (exit_code, output) == (2, ""), f"{number}: {text}"
        assert text.startswith("error: "), text
        assert "\n  fix: " in text, text
        assert "Traceback" not in text, text
        assert len(text) < 4000
        assert all(line.isprintable() for line in text.splitlines()), repr(text)
        assert not (tmp_path / "executed").exists()
        assert not (tmp_path / "ours").exists()
        shutil.rmtree(folder)
