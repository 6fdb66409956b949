"""Samples of --dataset: what an item may hold, its masks and positions, and errors that name the sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.user_function import UserFunction
from megatrain.data.samples.build import SamplePlans, SplitDatasets
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.user_dataset import build_user_datasets, first_digests

LENGTH, VOCAB = 4, 10
IDS = [1, 2, 3, 4, 5]


def build(
    folder: Path, body: str, plans: dict[str, Any] | None = None, cyclic: bool = False, **options: Any
) -> SplitDatasets:
    """Build the datasets of a function with this body."""
    file = folder / "mine.py"
    file.write_text(f"import numpy as np, torch\ndef f(request):\n    {body}\n")
    return build_user_datasets(
        UserFunction(str(file), "f", "--dataset"),
        SampleOptions(seq_length=LENGTH, eod=2, vocab_size=VOCAB, **options),
        SamplePlans(**{"train": (2,), "valid": (0,), "test": (0,), "seed": 7, **(plans or {})}),
        DataConfig(seq_length=LENGTH, dataset_digest=None, dataloader_type="cyclic" if cyclic else "single"),
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
    )


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("[1, 2, 3, 4, 5]", {}),
        ("torch.tensor([1, 2, 3, 4, 5])", {}),
        ("dict(tokens=np.arange(1, 6, dtype=np.uint16), loss_mask=[1, 0, .5, 1])", {"loss_mask": [1, 0, 0.5, 1]}),
        ("dict(tokens=[1, 2, 3, 4], labels=[-100, 3, 4, 9])", {"labels": [-100, 3, 4, 9]}),
        ("dict(tokens=[1, 2, 3, 4, 5], position_ids=[3, 2, 1, 0])", {"position_ids": [3, 2, 1, 0]}),
    ],
)  # fmt: skip
def test_entries_of_a_sample(tmp_path: Path, item: str, expected: dict[str, list[float]]) -> None:
    train = build(tmp_path, f"return [{item}] * 2").train
    assert train is not None
    sample = vars(train[1])
    whole = {"tokens": IDS[:4], "labels": IDS[1:], "loss_mask": [1] * 4, "position_ids": [0, 1, 2, 3]}
    for name, values in (whole | expected).items():
        np.testing.assert_array_equal(sample[name], values)


def test_masks_of_documents_work_as_with_files(tmp_path: Path) -> None:
    options = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    train = build(tmp_path, "return [[1, 2, 3, 4, 5]] * 2", **options).train
    assert train is not None
    sample = train[0]
    assert sample.position_ids.tolist() == [0, 1, 0, 1]
    assert sample.document_starts.tolist() == [0, 2]
    assert sample.loss_mask.tolist() == [1, 0, 1, 1]
    body = "return [dict(tokens=[1, 2, 3, 4, 5], document_starts=[0, 3])] * 2"
    train = build(tmp_path, body, inter_document_masking=True).train
    assert train is not None
    assert (train[0].document_starts.tolist(), train[0].position_ids.tolist()) == ([0, 3], [0, 1, 2, 0])
    with pytest.raises(ConfigError, match="fix: add --dataloader-inter-document-masking"):
        build(tmp_path, body)


def test_an_extended_run_asks_for_further_samples(tmp_path: Path) -> None:
    """Samples of the first request stay what they were; the tokens here are what the function was asked for."""
    body = "return [[request.num_samples or 0, request.first_sample, request.seed, 0, 0]] * 9"
    splits = build(tmp_path, body, {"train": (3, 2), "valid": (None,)})
    assert splits.train is not None
    tokens = [splits.train[k].tokens.tolist()[:3] for k in (0, 2, 3, 4)]
    assert tokens == [[3, 0, 7], [3, 0, 7], [2, 3, 8], [2, 3, 8]]
    assert splits.test is None
    assert len(set(first_digests(splits))) == 3  # of both plans of train, and of valid
    for split in ("valid", "test"):  # the first plan has samples
        with pytest.raises(
            ConfigError, match=rf"the {split} data: the function returned NoneType[\s\S]*fix: "
        ):
            build(tmp_path, "return None if request.first_sample else [[1, 2, 3, 4, 5]] * 9", {split: (3, 2)})
    body = "return None if request.split == 'valid' else [request.tokenizer.encode('1 2 3 4 5')] * 2"
    splits = build(tmp_path, body, {"valid": (2,), "test": (2,)})
    assert splits.valid is None
    assert splits.test is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [[1, 2, 3, 4]] * 2", r"the train data: sample 0 has tokens of shape \[4\]"),
        ("return [dict(tokens=[[1, 2, 3, 4]], labels=[1, 2, 3, 4])] * 2", r"sample 0 has tokens of shape \[1, 4\]"),
        ("return [dict(tokens=[1, 2, 3, 4, 5], labels=[1, 2, 3, 4])] * 2", r"sample 0 has tokens of shape \[5\]"),
        ("return [[1., 2., 3., 4., 5.]] * 2", "sample 0 has tokens of type float64"),
        ("return [[[1], [2, 3]]] * 2", "sample 0 has tokens that are no array"),
        ("return ['abcde'] * 2", "sample 0 has tokens of shape"),
        ("return [[1, 2, 3, 10, 5]] * 2", r"sample 0 has id 10 in tokens\[3\], outside the vocabulary of 10"),
        ("return [[1, -5, 3, 4, 5]] * 2", r"sample 0 has id -5 in tokens\[1\]"),
        ("return [dict(tokens=[1, 2, 3, 4], labels=[1, 2, 3, 11])] * 2", r"sample 0 has id 11 in labels\[3\]"),
        ("return [dict(token=[1, 2, 3, 4, 5])] * 2", "sample 0 has the entries token"),
        ("return [dict(tokens=[1, 2, 3, 4, 5], loss_mask=[1, 1, 1, -1])] * 2", "sample 0 has a loss_mask"),
        ("return [dict(tokens=[1, 2, 3, 4, 5], position_ids=[0, 1, 2, -3])] * 2", "sample 0 has position -3"),
        ("return [[1, 2, 3, 4, 5]]", "returned 1 samples, and the run needs 2"),
        ("return 5", "returned int, which has no length"),
        ("return None", "returned NoneType"),
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(.*mine.py:3\)"),
        ("return type('D', (), {'__len__': lambda d: 2, '__getitem__': lambda d, k: {}[k]})()", r"KeyError: 0 \(.*mine.py:3\)"),
        ("return type('D', (), {'__len__': lambda d: 2, '__getitem__': lambda d, k: np.random.randint(0, 9, 5)})()", "sample 0 differs when"),
    ],
)  # fmt: skip
def test_errors_name_the_sample(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--dataset .*mine.py:f: .*{words}[\s\S]*fix: "):
        build(tmp_path, body)


def test_a_later_sample_is_checked_when_it_is_read(tmp_path: Path) -> None:
    train = build(tmp_path, "return [[1, 2, 3, 4, 5], [1, 2, 3, 4, 50]]").train
    assert train is not None
    with pytest.raises(ConfigError, match="sample 1 has id 50"):
        train[1]


def test_cyclic_samples_are_repeated(tmp_path: Path) -> None:
    splits = build(tmp_path, "return [[1, 2, 3, 4, 5]]", {"train": (50,)}, cyclic=True)
    assert splits.train is not None
    assert len(splits.train) == 1
    assert torch.tensor(splits.train[0].tokens).tolist() == IDS[:4]
