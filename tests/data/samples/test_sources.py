"""Data flags to blends to facts and back, and the checks of datasets against their descriptions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from damaged_pairs import FINGERPRINT, VOCAB, bin_, describe, write_pair
from recorded import write_dataset

from megatrain.config.derive.datasets import Blend, parse_weight
from megatrain.config.errors import ConfigError, InputError
from megatrain.config.facts import DatasetFacts, Facts
from megatrain.config.schema.data import DataConfig
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.samples.sources import (
    SAMPLED_BYTES,
    blends_from_config,
    blends_from_facts,
    content_digest,
    inspect_datasets,
    read_description,
    used_eod,
)

pytestmark = pytest.mark.usefixtures("ends_soon")


@pytest.fixture
def names(tmp_path):
    """Prefixes of three datasets."""
    return [str(write_pair(tmp_path / name, seed=seed)) for seed, name in enumerate("abc")]


def config_of(**values):
    return DataConfig(seq_length=8, split="969,30,1", data_cache_path=None, **values)


def check_round_trip(data, expected):
    """Flags -> blends -> facts, through JSON as other ranks receive them -> the same blends."""
    blends = blends_from_config(data)
    assert blends == expected
    facts, problems = inspect_datasets(blends, vocab_size=VOCAB, tokenizer_fingerprint=FINGERPRINT)
    assert not problems
    sent = Facts.from_json(Facts(datasets=tuple(facts)).to_json())
    assert blends_from_facts(sent.datasets) == expected
    assert list(blends_from_facts(sent.datasets)) == list(expected), "the order is kept"


def test_one_dataset(names):
    check_round_trip(config_of(data_path=(names[0],)), {"all": Blend((names[0],))})


def test_datasets_by_size(names):
    check_round_trip(config_of(data_path=tuple(names)), {"all": Blend(tuple(names))})


def test_datasets_by_weight(names):
    words = ("0.1", names[0], "3", names[1], "1e-3", names[2])
    check_round_trip(config_of(data_path=words), {"all": Blend(tuple(names), (0.1, 3.0, 0.001))})


def test_a_dataset_may_occur_twice(names):
    blend = Blend((names[0], names[1], names[0]), (1.0, 2.0, 3.0))
    words = tuple(word for pair in zip("123", blend.prefixes, strict=True) for word in pair)
    check_round_trip(config_of(data_path=words), {"all": blend})


def test_separate_splits(names):
    data = config_of(
        train_data_path=("2", names[0], "1", names[1]), valid_data_path=(names[1], names[2]), test_data_path=(names[0],)
    )  # fmt: skip
    expected = {
        "train": Blend((names[0], names[1]), (2.0, 1.0)),
        "valid": Blend((names[1], names[2])),
        "test": Blend((names[0],)),
    }
    check_round_trip(data, expected)


def test_data_arguments_from_a_file(names, tmp_path):
    (tmp_path / "words").write_text(f"0.25 {names[0]}\n\n  0.75\t{names[1]}\n")
    check_round_trip(
        config_of(data_args_path=str(tmp_path / "words")), {"all": Blend((names[0], names[1]), (0.25, 0.75))}
    )


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "texts"])
def test_splits_from_a_file(names, tmp_path, as_text):
    words = {"test": [names[2]], "train": ["0.3", names[0], "0.7", names[1]], "valid": None}
    if as_text:
        words = {name: found and " ".join(found) for name, found in words.items()}
    (tmp_path / "words.json").write_text(json.dumps(words))
    check_round_trip(
        config_of(per_split_data_args_path=str(tmp_path / "words.json")),
        {"train": Blend((names[0], names[1]), (0.3, 0.7)), "test": Blend((names[2],))},
    )


def test_weights_in_a_file_of_splits_may_be_numbers(names, tmp_path):
    (tmp_path / "words.json").write_text(json.dumps({"train": [0.1, names[0], 2, names[1]]}))
    check_round_trip(
        config_of(per_split_data_args_path=str(tmp_path / "words.json")),
        {"train": Blend((names[0], names[1]), (0.1, 2.0))},
    )


def test_mock_data_has_no_blends():
    assert blends_from_config(config_of(mock_data=True)) == {}
    assert inspect_datasets({}, vocab_size=VOCAB, tokenizer_fingerprint=None) == ([], [])
    assert blends_from_facts([]) == {}


def test_facts_match_the_dataset(names):
    (facts,), _ = inspect_datasets(
        {"all": Blend((names[0],))}, vocab_size=VOCAB, tokenizer_fingerprint=FINGERPRINT
    )
    dataset = IndexedDataset(names[0])
    assert facts == DatasetFacts(
        split="all",
        prefix=names[0],
        weight=None,
        num_sequences=len(dataset),
        num_tokens=int(dataset.lengths.sum()),
        num_documents=dataset.num_documents,
        digest=content_digest(dataset),
    )


def test_a_loss_mask_beside_a_dataset_is_a_fact(names):
    for suffix in ("bin", "idx"):
        Path(f"{names[0]}_loss_mask.{suffix}").write_bytes(Path(f"{names[0]}.{suffix}").read_bytes())
    blend = {"all": Blend((names[0], names[1]))}
    facts, _ = inspect_datasets(blend, vocab_size=VOCAB, tokenizer_fingerprint=None)
    assert [one.has_loss_mask for one in facts] == [True, False]


def test_every_problem_is_reported_once(names, tmp_path):
    missing = str(tmp_path / "missing")
    describe(names[1], tokenizer_fingerprint="other")
    describe(names[2], largest_id=VOCAB)
    blends = {"train": Blend((*names, missing, missing, names[1])), "valid": Blend((missing, names[2]))}
    facts, problems = inspect_datasets(blends, vocab_size=VOCAB, tokenizer_fingerprint=FINGERPRINT)
    texts = [problem.text.removeprefix(str(tmp_path)) for problem in problems]
    assert [line.split()[0] for line in texts] == ["/b.bin", "/c.bin", "/missing.bin:"]
    assert "another tokenizer" in texts[0]
    assert f"id {VOCAB}," in texts[1]
    assert missing not in [dataset.prefix for dataset in facts]


def test_a_blend_in_one_text_is_answered_with_a_list():
    _, (problem,) = inspect_datasets(
        {"all": Blend(("0.7 a 0.3 b",))}, vocab_size=None, tokenizer_fingerprint=None
    )
    assert "[0.7, a, 0.3, b]" in problem.fix


def test_another_tokenizer_is_reported_instead_of_its_ids(names):
    describe(names[0], tokenizer_fingerprint="other", largest_id=VOCAB)
    _, (problem,) = inspect_datasets(
        {"all": Blend((names[0],))}, vocab_size=VOCAB, tokenizer_fingerprint=FINGERPRINT
    )
    assert "another tokenizer" in problem.text


@pytest.mark.parametrize(
    ("made_with", "eod", "fix"),
    [
        (None, 7, "give --null-tokenizer-eod-id 3"),
        (FINGERPRINT, 7, "name the same eos_token in tokenizer_config.json"),
        (None, 3, None),
        (None, None, None),
    ],
)
def test_another_end_of_document_id_is_reported(names, made_with, eod, fix):
    describe(names[0], tokenizer_fingerprint=FINGERPRINT, eod=3)
    _, problems = inspect_datasets(
        {"all": Blend((names[0],))}, vocab_size=VOCAB, tokenizer_fingerprint=made_with, eod=eod
    )
    assert len(problems) == (fix is not None)
    for problem in problems:
        assert f"{names[0]}.bin" in problem.text
        assert "id 3" in problem.text
        assert "is 7" in problem.text
        assert problem.fix.startswith(fix)


def test_data_without_a_known_end_of_document_id_is_accepted(names):
    for eod in (None, "none"):
        describe(names[0], eod=eod)
        blends = {"all": Blend((names[0],))}
        assert not inspect_datasets(blends, vocab_size=VOCAB, tokenizer_fingerprint=None, eod=7)[1]


@pytest.mark.parametrize("flag", ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"])
def test_the_end_of_document_id_matters_if_a_flag_uses_it(flag):
    assert used_eod(config_of(), 5) is None
    assert used_eod(config_of(**{flag: True}), 5) == 5
    assert used_eod(config_of(**{flag: True}), None) is None


@pytest.mark.parametrize(
    ("word", "number"), [("3", 3.0), ("1e-3", 0.001), ("-1", -1.0), ("a", None), ("1a", None)]
)
def test_a_weight_is_a_number(word, number):
    assert parse_weight(word) == number


def test_the_description_of_a_dataset_is_its_json_file(names, tmp_path):
    content = {"tokenizer_type": "x", "tokenizer_fingerprint": None, "vocab_size": 3, "else": [1]}
    describe(names[0], **content)
    assert read_description(names[0]) == content
    assert read_description(str(tmp_path / "nothing")) is None
    describe(names[0], vocab_size="3")
    with pytest.raises(InputError, match="vocab_size is '3'"):
        read_description(names[0])


def test_a_digest_depends_on_the_content_alone(tmp_path):
    one, same = (IndexedDataset(write_pair(tmp_path / name, seed=4)) for name in "xy")
    assert content_digest(one) == content_digest(same)
    assert content_digest(one) == content_digest(IndexedDataset(one.prefix, mmap=False))


def test_every_id_of_a_small_dataset_is_in_its_digest(names):
    expected = content_digest(IndexedDataset(names[0]))
    content = bin_(names[0]).read_bytes()
    for position in range(len(content)):
        bin_(names[0]).write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        assert content_digest(IndexedDataset(names[0])) != expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.51, 0.99, 0.999999])
def test_beginning_middle_and_end_of_a_large_dataset_are_in_its_digest(tmp_path, share):
    ids = np.zeros(4 * SAMPLED_BYTES, np.int32)
    expected = content_digest(write_dataset(tmp_path / "data", [[ids]], "int32"))
    ids[int(share * len(ids))] = 1
    assert content_digest(write_dataset(tmp_path / "data", [[ids]], "int32")) != expected


def test_lengths_and_types_are_in_the_digest(tmp_path):
    digests = {
        content_digest(write_dataset(tmp_path / "data", documents, dtype))
        for documents in ([[[1, 2, 3, 4]]], [[[1, 2], [3, 4]]], [[[1, 2], [3], [4]]], [[[1, 2, 3], [4]]])
        for dtype in ("uint16", "int16", "int32", "int64", "uint8")
    }
    assert len(digests) == 20


def test_the_digest_is_of_the_open_file(names):
    """The run reads the same bytes, also if another file takes the name."""
    dataset = IndexedDataset(names[0])
    expected = content_digest(dataset)
    bin_(names[0]).unlink()
    assert content_digest(dataset) == expected
    with pytest.raises(InputError, match=r"a\.bin: there is no such file\n  fix: "):
        IndexedDataset(names[0])


FILES = {
    "empty": (b"", r"words: .*empty"),
    "blank": (b" \n\t\n", r"words: .*empty"),
    "not UTF-8": (b"\xff\xfea", r"words: .*UTF-8"),
    "a weight of 0": (b"0 a 1 b", r": .* a .*0"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_of_data_arguments_is_an_error(tmp_path, name):
    content, pattern = FILES[name]
    (tmp_path / "words").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--data-args-path.*{pattern}.*\n  fix: "):
        blends_from_config(config_of(data_args_path=str(tmp_path / "words")))


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
@pytest.mark.parametrize(
    ("name", "reason"), [("missing", "No such file or directory"), ("", "Is a directory")]
)
def test_a_missing_file_of_data_arguments_is_an_error(tmp_path, flag, name, reason):
    pattern = rf"--{flag.replace('_', '-')} {tmp_path}.*{reason}\n  fix: give an existing .*file"
    with pytest.raises(InputError, match=pattern):
        blends_from_config(config_of(**{flag: str(tmp_path / name)}))


SPLIT_FILES = {
    "bad JSON": ('{"train": ["a"],\n "valid": }', r"words\.json:2: .*Expecting value at column 11"),
    "cut": ('{"train":\n["a"', r"words\.json:2: .*JSON"),
    "empty": ("", r"words\.json:1: .*Expecting value at column 1"),
    "BOM": ('\ufeff{"train": "a"}', r"words\.json:1: .*Unexpected UTF-8 BOM"),
    "a list": ('["a"]', r"words\.json: .*JSON object"),
    "pairs": ('[["train", ["a"]]]', r"words\.json: .*JSON object"),
    "unknown split": ('{"train": ["a"], "val": ["b"]}', r"words\.json: 'val' "),
    "a split twice": ('{"train": ["a"], "train": ["b"]}', r"words\.json: 'train' .*twice"),
    "a number": ('{"train": 5}', r"words\.json: 'train' .*list"),
    "an object": ('{"train": {"a": 1}}', r"words\.json: 'train' .*list"),
    "an empty object": ('{"train": {}}', r"words\.json: 'train' .*list"),
    "lists in a list": ('{"train": [[1, "a"]]}', r"words\.json: 'train' .*list"),
    "a flag": ('{"train": [true, "a"]}', r"words\.json: 'train' .*list"),
    "null in a list": ('{"train": [null, "a"]}', r"words\.json: 'train' .*list"),
    "nothing": ('{"train": []}', r"words\.json: .*names no datasets"),
    "too deep": ("[" * 100_000, r"words\.json: .*maximum recursion"),
    "endless number": ('{"train": [1' + "0" * 5000 + ', "a"]}', r"words\.json: .*Exceeds the limit"),
    "NaN": ('{"train": [NaN, "a"]}', r"--per-split-data-args-path: .* a .*nan"),
    "too large": ('{"train": [1e999, "a"]}', r"--per-split-data-args-path: .* a .*inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT_FILES)
def test_a_bad_file_of_splits_is_an_error(tmp_path, name):
    content, pattern = SPLIT_FILES[name]
    (tmp_path / "words.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{pattern}.*\n  fix: "):
        blends_from_config(config_of(per_split_data_args_path=str(tmp_path / "words.json")))
