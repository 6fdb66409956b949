"""Samples of BERT and T5 held to what Megatron-LM's datasets returned: orders of samples, samples, hashes of all arrays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import digest, write_dataset

from megatrain.config.derive.datasets import SPLIT_NAMES, Blend
from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.samples.blend import BlendedDataset
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.dataset import FamilySample
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.masked_dataset import MaskedDataset, MaskedSamples
from megatrain.data.samples.masking import MaskOptions
from megatrain.data.samples.sentence_index import SentenceOrder, build_sentence_index
from megatrain.data.tokenizers import mask_tokens
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.mask_tokens import MaskVocabulary, mask_vocabulary

TOKENIZERS = {
    "bert": ("BertWordPieceLowerCase", "vocab-uncased.txt"),
    "t5": ("BertWordPieceCase", "vocab-cased.txt"),
}
RECORDED = 400
"""Samples that a hash of `all` covers, at most."""


@pytest.fixture(scope="module")
def sentences(families: Path) -> Path:
    return families / "sentences"


@pytest.fixture(scope="module")
def recording(sentences: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((sentences / "masked.json").read_text())
    return content


@pytest.fixture(scope="module")
def vocabularies(sentences: Path) -> dict[str, MaskVocabulary]:
    return {family: vocabulary_of(family, sentences) for family in TOKENIZERS}


def vocabulary_of(family: str, sentences: Path) -> MaskVocabulary:
    kind, file = TOKENIZERS[family]
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type=kind, vocab_file=str(sentences / file)))
    return mask_vocabulary(tokenizer, needs_sentinels=family == "t5")


def options_of(case: dict[str, Any], vocabularies: dict[str, MaskVocabulary]) -> MaskedSamples:
    given = case["options"]
    words = MaskOptions(
        probability=given["masking_probability"],
        max_words=given["masking_max_ngram"],
        is_geometric=given["masking_use_geometric_distribution"],
        longer_first=given["masking_use_longer_ngrams"],
        whole_words=given["masking_do_full_word"],
    )
    return MaskedSamples(
        family=case["dataset"],
        seq_length=case["sequence_length"],
        decoder_seq_length=given.get("sequence_length_decoder", 0),
        has_order_head=given.get("classification_head", False),
        short_probability=given["short_sequence_probability"],
        words=words,
        vocabulary=vocabularies[case["dataset"]],
    )


def builder(options: MaskedSamples, **others: Any) -> SplitBuilder:
    gpt = SampleOptions(seq_length=options.seq_length, eod=3)
    return SplitBuilder(gpt, masked=options, **({"log": pytest.fail} | others))


def test_all_recorded_cases(sentences, recording, vocabularies) -> None:
    """One test for all cases, so that another recording may have others."""
    assert recording["cases"]
    for case in recording["cases"]:
        assert not case["options"]["masking_do_permutation"], "it cannot be reproduced"
        check_case(case, sentences, vocabularies)


def test_sentinels_that_are_off_by_one_are_found(sentences, recording, monkeypatch) -> None:
    """A planted fault: parity cannot find it, since all its layouts read the same samples."""
    sentinels = mask_tokens._sentinels
    monkeypatch.setattr(mask_tokens, "_sentinels", lambda tokenizer: sentinels(tokenizer)[1:])
    shifted = {"t5": vocabulary_of("t5", sentences)}
    cases = [case for case in recording["cases"] if case["dataset"] == "t5"]
    assert cases
    for case in cases:
        with pytest.raises(AssertionError, match="text_enc"):
            check_case(case, sentences, shifted)


def check_case(case: dict[str, Any], sentences: Path, vocabularies: dict[str, MaskVocabulary]) -> None:
    weights = case["weights"]
    blend = Blend(tuple(str(sentences / name) for name in case["prefixes"]), weights and tuple(weights))
    plans = SamplePlans(
        **{name: (count,) for name, count in zip(SPLIT_NAMES, case["sizes"], strict=True)}, seed=case["seed"]
    )
    splits = builder(options_of(case, vocabularies), log=list[str]().append).build(
        {"all": blend}, case["split"], plans
    )
    for name, recorded in case["splits"].items():
        built = getattr(splits, name)
        if built is None:
            assert recorded is None or recorded["num_samples_requested"] == 0
        else:
            check_split(built, recorded)


def check_split(built: Any, recorded: dict[str, Any]) -> None:
    assert len(built) == recorded["length"]
    if isinstance(built, BlendedDataset):
        assert recorded["type"] == "blended"
        check_recorded(built.index.dataset_index, recorded["dataset_index"])
        check_recorded(built.index.dataset_sample_index, recorded["dataset_sample_index"])
        for dataset, member in zip(built.datasets, recorded["datasets"], strict=True):
            check_split(dataset, member)
    else:
        assert isinstance(built, MaskedDataset)
        check_recorded(built.index.samples, recorded["sample_index"])
    count = recorded["all"]["samples"]
    assert count == min(len(built), RECORDED)
    first = [built[k].arrays for k in range(count)]
    for name, expected in recorded["all"].items():
        if name != "samples":
            assert digest(np.stack([one[name] for one in first])) == expected, name
    assert set(first[0]) == set(recorded["all"]) - {"samples"}
    for sample in recorded["samples"]:
        arrays = dict(built[sample["k"]].arrays)
        if isinstance(built, BlendedDataset):
            arrays["dataset_id"] = np.array(built.index.dataset_index[sample["k"]])
        check_sample(arrays, sample)


def check_recorded(array: Any, recorded: dict[str, Any]) -> None:
    """Compare with an array of this recording, which has other numbers of first and last values."""
    flat = np.asarray(array).reshape(-1).tolist()
    first, last = (np.reshape(recorded.get(name, []), -1).tolist() for name in ("first", "last"))
    assert flat[: len(first)] == first
    assert flat[len(flat) - len(last) :] == last
    assert list(np.shape(array)) == recorded["shape"]
    assert np.asarray(array).dtype == recorded["dtype"]
    assert digest(array) == recorded["sha256"]


def check_sample(arrays: dict[str, Any], recorded: dict[str, Any]) -> None:
    for name, values in recorded.items():
        if name == "masked":
            places = np.flatnonzero(arrays["loss_mask"])
            assert [
                [place, label]
                for place, label in zip(places.tolist(), arrays["labels"][places].tolist(), strict=True)
            ] == values
        elif name == "second_from":
            ones = np.flatnonzero(arrays["types"])
            assert (int(ones[0]) if len(ones) else None) == values
        elif name != "k":
            found = arrays[name]
            assert np.atleast_1d(found)[: np.size(values)].tolist() == np.reshape(values, -1).tolist(), name


def test_recorded_walks_over_other_lengths(recording) -> None:
    for walk in recording["sample_index_walk"]:
        index = build_sentence_index(
            np.array(walk["sentence_lengths"]),
            np.array(walk["document_borders"]),
            range(len(walk["document_borders"]) - 1),
            SentenceOrder(
                max_tokens=walk["max_length"],
                min_sentences=walk["min_sentences"],
                short_probability=walk["short_probability"],
                seed=walk["seed"],
            ),
            num_samples=walk["num_samples"],
        )
        check_recorded(index.samples, walk["result"])


# ---- without recordings


VOCABULARY = MaskVocabulary(
    size=200,
    cls=2,
    sep=3,
    mask=4,
    continues=np.arange(200) % 5 == 0,
    sentinels=tuple(range(180, 190)),
)
BERT = MaskedSamples(
    family="bert",
    seq_length=24,
    words=MaskOptions(probability=0.15, max_words=3, is_geometric=False),
    vocabulary=VOCABULARY,
)
T5 = MaskedSamples(
    family="t5",
    seq_length=24,
    decoder_seq_length=16,
    words=MaskOptions(probability=0.15, max_words=10, is_geometric=True),
    vocabulary=VOCABULARY,
)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """40 documents of 1 to 8 sentences of 1 to 9 tokens."""
    random = np.random.default_rng(0)
    documents = [
        [random.integers(5, 180, random.integers(1, 10)).tolist() for _ in range(1 + number % 8)]
        for number in range(40)
    ]
    return write_dataset(tmp_path / "corpus", documents).prefix


def built(
    corpus: str, options: MaskedSamples, split: str = "1,0,0", count: int | None = 50, **others: Any
) -> Any:
    plans = SamplePlans(train=(count,), valid=(0,), test=(0,), seed=7)
    log = {"log": list[str]().append}
    return builder(options, **(log | others)).build({"all": Blend((corpus,))}, split, plans).train


@pytest.mark.parametrize("options", [BERT, T5], ids=["bert", "t5"])
def test_a_sample_depends_on_seed_and_number_alone(corpus, options) -> None:
    first, second = built(corpus, options), built(corpus, options)
    order = np.random.default_rng(1).permutation(len(first)).tolist()
    found = {k: second[k].arrays for k in order}
    for k in range(len(first)):
        assert all(np.array_equal(values, found[k][name]) for name, values in first[k].arrays.items())


@pytest.mark.parametrize("options", [BERT, T5], ids=["bert", "t5"])
def test_all_samples_of_one_epoch_are_read_once(corpus, options) -> None:
    samples = built(corpus, options, count=None)
    assert samples.index.num_epochs == 1
    read = [span.sequence for k in range(len(samples)) for span in samples.spans(k)]
    boundaries = samples.source.document_boundaries
    least = options.min_sentences
    expected = [
        sequence
        for first, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)
        for sequence in range(first, end)
        if end - first >= least
    ]
    assert sorted(read) == expected


def test_an_index_in_the_cache_is_the_same(corpus, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("megatrain.data.samples.index_cache.WORTH_ROWS", 1)
    outcomes: list[str] = []

    def cached(options: MaskedSamples) -> np.ndarray:
        samples = built(
            corpus,
            options,
            cache_folder=tmp_path / "cache",
            on_built=lambda one: outcomes.append(one.outcome),
        )
        return np.array(samples.index.samples)

    computed = np.array(built(corpus, BERT).index.samples)
    assert np.array_equal(cached(BERT), computed)
    assert np.array_equal(cached(BERT), computed)
    cached(T5)
    assert outcomes == ["built", "found", "built"]


def test_blocks_of_documents_change_nothing(corpus, monkeypatch) -> None:
    whole = built(corpus, BERT).index.samples
    monkeypatch.setattr("megatrain.data.samples.sentence_index.BLOCK_SENTENCES", 3)
    assert np.array_equal(built(corpus, BERT).index.samples, whole)


def test_documents_without_any_sample_are_an_error(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[[5, 6]], [[7], [8] * 513], []]).prefix
    with pytest.raises(ConfigError) as caught:
        built(prefix, BERT)
    assert "documents 0 to 3 (excluded) give no sample: of 3, 2 have fewer than 2 sentences, 1 have a" in str(
        caught.value
    )


def test_data_that_is_not_split_into_sentences_is_an_error(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[[5, 6, 7, 8]]] * 9).prefix
    with pytest.raises(
        ConfigError, match=r"not split into sentences\n  fix: .*--split-sentences.*--bert-no-binary-head"
    ):
        built(prefix, BERT)
    assert len(built(prefix, T5)) == 54


def test_a_split_without_documents_is_an_error(corpus) -> None:
    plans = SamplePlans(train=(10,), valid=(10,), test=(10,), seed=7)
    with pytest.raises(
        ConfigError, match=r"--split '98,1,1' of the 40 documents of .* is train 39, valid 1, test 0"
    ):
        builder(BERT).build({"all": Blend((corpus,))}, "98,1,1", plans)


def test_spans_that_the_decoder_does_not_hold_are_an_error(corpus) -> None:
    small = MaskedSamples(**(vars(T5) | {"decoder_seq_length": 2}))
    with pytest.raises(
        InputError,
        match=r"spans of sample \d+ .* more than --decoder-seq-length 2\n  fix: use --decoder-seq-length 7 or",
    ):
        built(corpus, small)
    largest = MaskedSamples(**(vars(T5) | {"decoder_seq_length": 7}))
    samples = built(corpus, largest, count=400)
    assert max(int(samples[k].arrays["loss_mask"].sum()) for k in range(len(samples))) <= 7


def test_more_spans_than_sentinels_are_an_error(corpus) -> None:
    few = MaskVocabulary(**(vars(VOCABULARY) | {"sentinels": (180,)}))
    words = MaskOptions(probability=0.5, max_words=1, is_geometric=True)
    options = MaskedSamples(**(vars(T5) | {"vocabulary": few, "words": words}))
    with pytest.raises(
        InputError, match=r"sample \d+ has \d+ spans, but there are 1 sentinels\n  fix: .*--mask-prob"
    ):
        built(corpus, options)


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[[5, 6], [7, 250]]]).prefix
    with pytest.raises(
        InputError,
        match=r"document 0 \(from sequence 0 on\) has ids from 5 to 250, outside the vocabulary of 200",
    ):
        built(prefix, BERT)


@pytest.mark.parametrize(
    ("tokens", "family", "problem"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"], "t5", "no sentinels <extra_id_0>"),
        (
            ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "a"],
            "bert",
            "padding token of the tokenizer has id 1",
        ),
    ],
)
def test_tokenizers_without_the_tokens_are_refused(tmp_path, tokens, family, problem) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    config = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"))
    with pytest.raises(ConfigError, match=problem):
        mask_vocabulary(load_tokenizer(config), needs_sentinels=family == "t5")
    null = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    with pytest.raises(
        ConfigError,
        match=r"no token \[CLS\] and no \[SEP\] and no \[MASK\].*\n  fix: use --tokenizer-type Bert",
    ):
        mask_vocabulary(null, needs_sentinels=False)


def test_samples_without_a_mask_have_no_loss(corpus) -> None:
    """A short target leaves a budget below one token, as in Megatron-LM: no position counts."""
    options = MaskedSamples(**(vars(BERT) | {"short_probability": 1.0}))
    samples = built(corpus, options, count=400)
    short = [k for k in range(len(samples)) if samples.index.samples[k][2] < 6]
    assert short
    for k in short:
        sample = samples[k]
        assert isinstance(sample, FamilySample)
        assert not sample.arrays["loss_mask"].any()
        assert (sample.arrays["labels"] == -1).all()


def test_a_second_text_without_tokens_has_no_sep(tmp_path) -> None:
    """Sentences may be empty in data that another program made."""
    prefix = write_dataset(tmp_path / "a", [[[5, 6, 7], []]] * 9).prefix
    samples = built(prefix, replace(BERT, short_probability=0.0))
    seen = set()
    for k in range(len(samples)):
        arrays = samples[k].arrays
        length = 5 if not arrays["is_random"] else 6
        assert np.flatnonzero(arrays["text"])[-1] == length - 1
        assert arrays["types"].sum() == (4 if arrays["is_random"] else 0)
        seen.add(length)
    assert seen == {5, 6}


def test_documents_that_are_left_out_are_counted(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[[5, 6]], [[7], [8] * 513], [], [[5], [6]], [[9] * 600]]).prefix
    lines: list[str] = []
    assert len(built(prefix, BERT, log=lines.append)) == 50
    (line,) = lines
    assert (
        f"{prefix}.bin: of 5 documents of the train data, 4 are left out: 3 have too few sentences, 1 a"
        in line
    )
    built(prefix, T5, log=lines.append)
    assert "2 are left out: 1 have too few sentences, 1 a sentence" in lines[1]


def test_a_corpus_that_is_read_whole_has_no_line(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "a", [[[5, 6], [7]]] * 9).prefix
    built(prefix, BERT, log=pytest.fail)
