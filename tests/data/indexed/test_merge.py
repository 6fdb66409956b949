"""Merging: recorded bytes, merged descriptions, and errors that name both datasets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preprocessing import NULL, numbers, run
from recorded import EXPECTED, GOLDEN, check_recorded, write_dataset

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.indexed import merge as module
from megatrain.data.indexed.merge import merge
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter


def test_recorded_datasets_merge_to_the_recorded_bytes(golden_text, tmp_path, capsys):
    names = ["paragraphs", "corpus", "paragraphs"]
    merge([golden_text / f"{name}_text_document" for name in names], tmp_path / "out")
    check_recorded(tmp_path / "out", EXPECTED["derived_files"]["merged"])
    assert capsys.readouterr().out.endswith("tokens of uint16, from 3 datasets\n")


def test_modes_are_merged(tmp_path):
    merge([GOLDEN / "modes_int32"] * 2, tmp_path / "out")
    check_recorded(tmp_path / "out", EXPECTED["derived_files"]["merged_modes"])


def test_blocks_of_any_size_give_the_same_result(tmp_path, monkeypatch):
    documents = [[[1, 2], [3]], [], [[], [4]], [[5] * 50]]
    for name in ("a", "b"):
        write_dataset(tmp_path / name, documents)
    write_dataset(tmp_path / "empty", [])
    inputs = [tmp_path / name for name in ("a", "empty", "b")]
    merge(inputs, tmp_path / "whole", log=str)
    monkeypatch.setattr(module, "_DOCUMENTS", 1)
    monkeypatch.setattr(module, "_ELEMENT_BYTES", 4)
    merge(inputs, tmp_path / "blocks", log=str)
    write_dataset(tmp_path / "expected", documents * 2)
    for suffix in (".bin", ".idx"):
        contents = {(tmp_path / f"{name}{suffix}").read_bytes() for name in ("whole", "blocks", "expected")}
        assert len(contents) == 1


def described(tmp_path, name, texts, *flags):
    assert (
        run("--input", numbers(tmp_path / f"{name}.jsonl", texts), *NULL, *flags, prefix=tmp_path / name) == 0
    )
    return tmp_path / f"{name}_text_document"


def test_descriptions_are_merged(tmp_path):
    first = described(tmp_path, "a", ["1 2", ""], "--append-eod")
    second = described(tmp_path, "b", ["7 55"])
    merge([first, second, first], tmp_path / "out", log=str)
    merged = json.loads((tmp_path / "out.json").read_text())
    parts = [json.loads(Path(f"{prefix}.json").read_text()) for prefix in (first, second, first)]
    assert set(merged) == set(parts[0])
    assert merged["tokenizer_fingerprint"] == parts[0]["tokenizer_fingerprint"]
    assert merged["append_eod"] is None
    assert merged["largest_id"] == 99
    assert (merged["documents"], merged["sequences"], merged["tokens"], merged["eod_count"]) == (5, 3, 8, 2)
    assert merged["sources"] == [part["sources"][0] for part in parts]
    Path(f"{second}.json").unlink()
    logged = []
    merge([first, second], tmp_path / "out", log=logged.append)
    assert logged[0].startswith(f"{second}.json is missing")
    assert not (tmp_path / "out.json").exists()


def conversations(tmp_path, name, texts):
    (tmp_path / f"{name}.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n" for text in texts)
    )
    flags = ["--sft", "--sft-tokenizer-prompt-format", "identity", *NULL]
    assert run("--input", tmp_path / f"{name}.jsonl", *flags, prefix=tmp_path / name) == 0
    return tmp_path / f"{name}_messages_document"


def test_loss_masks_of_conversations_are_merged(tmp_path):
    first, second = conversations(tmp_path, "a", ["1 2", "3"]), conversations(tmp_path, "b", ["4"])
    merge([second, first], tmp_path / "out", log=str)
    mask = IndexedDataset(tmp_path / "out_loss_mask")
    assert mask.dtype.name == "uint8"
    assert mask.lengths.tolist() == IndexedDataset(tmp_path / "out").lengths.tolist() == [2, 3, 2]
    assert json.loads((tmp_path / "out.json").read_text())["prompt_format"] == "identity"
    plain = described(tmp_path, "c", ["1 2"])
    with pytest.raises(ConfigError, match=f"{first} has a loss mask .*, and {plain} has none"):
        merge([first, plain], tmp_path / "new", log=str)
    with pytest.raises(ConfigError, match=r"out_loss_mask.idx: is the loss mask of other data"):
        merge([plain], tmp_path / "out", log=str)
    assert not list(tmp_path.glob("new*"))


def test_incompatible_datasets_are_errors(tmp_path):
    small, wide = tmp_path / "small", tmp_path / "wide"
    write_dataset(small, [[[1]]])
    write_dataset(wide, [[[1]]], "int32")
    modes = GOLDEN / "modes_int32"
    with pytest.raises(ConfigError, match=f"{wide}: .*int32, .*{small} .*uint16"):
        merge([small, wide], tmp_path / "out")
    with pytest.raises(ConfigError, match=f"{modes}: has modes, .*{wide} has no modes"):
        merge([wide, modes], tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"{small}: .*\n  fix: .*--output-prefix"):
        merge([small, small], tmp_path / "." / "small")
    with pytest.raises(InputError, match=r"gone.bin: there is no such file"):
        merge([small, tmp_path / "gone"], tmp_path / "out")
    with pytest.raises(ConfigError, match="no datasets"):
        merge([], tmp_path / "out")
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"mine.json: .*\n  fix: .*--output-prefix"):
        merge([small], tmp_path / "mine")
    first, second = described(tmp_path, "a", ["1"]), described(tmp_path, "b", ["1"], "--vocab-size", 98)
    with pytest.raises(InputError, match=rf"{second}: .*tokenizer.* {first} .*\n  fix: .*same tokenizer"):
        merge([first, second], tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_second_writer_of_a_dataset_is_an_error(tmp_path):
    write_dataset(tmp_path / "a", [[[1, 2]]])
    with IndexedWriter(tmp_path / "out", "uint16") as writer:
        writer.add_document([[7]])
        with pytest.raises(InputError, match=r"out\.lock: another run .*out\n  fix: wait for it"):
            merge([tmp_path / "a"], tmp_path / "out")
        writer.add_document([[8]])
    assert IndexedDataset(tmp_path / "out").num_tokens == 2
    merge([tmp_path / "a"], tmp_path / "out", log=str)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


def test_partial_files_of_a_dead_writer_are_not_merged(tmp_path):
    """No process holds its lock, and its description would describe other data."""
    write_dataset(tmp_path / "a", [[[1, 2]]])
    for name in ("lock", "json.partial", "idx.partial", "modes.partial", "owner.partial"):
        (tmp_path / f"out.{name}").write_text("{}")
    merge([tmp_path / "a"], tmp_path / "out", log=str)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


def test_an_unreadable_description_is_an_error(tmp_path):
    write_dataset(tmp_path / "a", [[[1]]])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InputError, match=r"a\.json: .*\n  fix: "):
        merge([tmp_path / "a"], tmp_path / "out")
    (tmp_path / "a.json").write_text('{"tokenizer_fingerprint": "x", "sources": null, "eod_count": "many"}')
    merge([tmp_path / "a"], tmp_path / "out", log=str)
    merged = json.loads((tmp_path / "out.json").read_text())
    assert (merged["sources"], merged["eod_count"]) == ([], None)


def test_data_of_one_tokenizer_may_be_older_or_of_another_file(tmp_path):
    """A fingerprint has a digest of ids and one of the file; older ones have the latter alone."""
    for name, fingerprint in {"new": "ids:file", "old": "file", "saved again": "ids:other"}.items():
        write_dataset(tmp_path / name, [[[1]]])
        (tmp_path / f"{name}.json").write_text(json.dumps({"tokenizer_fingerprint": fingerprint}))
    for name, shared in {"old": "file", "saved again": "ids"}.items():
        merge([tmp_path / "new", tmp_path / name], tmp_path / "out", log=str)
        assert json.loads((tmp_path / "out.json").read_text())["tokenizer_fingerprint"] == shared
    with pytest.raises(InputError, match="another tokenizer"):
        merge([tmp_path / "old", tmp_path / "saved again"], tmp_path / "out")


def test_a_failed_merge_keeps_the_old_dataset(tmp_path, monkeypatch):
    for name in ("a", "out"):
        write_dataset(tmp_path / name, [[[1, 2]]])
    before = (tmp_path / "out.bin").read_bytes()

    def fail(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(IndexedWriter, "_offsets", fail)
    with pytest.raises(Exception, match=r"out\.idx\.partial: .*No space left on device"):
        merge([tmp_path / "a"] * 2, tmp_path / "out")
    assert (tmp_path / "out.bin").read_bytes() == before
    assert IndexedDataset(tmp_path / "out").num_tokens == 2
    assert len(list(tmp_path.iterdir())) == 4
