"""Samples from a function of the user: `--dataset file.py:function`.

    def my_dataset(request: DatasetRequest) -> Sequence[Mapping[str, Array]]: ...

It is called for each split, once for each plan of samples, on each rank that reads samples. Sample k is a function of the
request and k alone: the sampler gives the order, which depends on no layout, and a run that resumes reads on where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.derive.datasets import SPLIT_NAMES
from megatrain.config.errors import ConfigError, InputError
from megatrain.data.samples.build import SamplePlans, SplitDatasets
from megatrain.data.samples.dataset import PlannedDataset, Sample, SampleDataset, TokenSpan
from megatrain.data.samples.gpt_dataset import SampleOptions, make_sample
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from megatrain.config.schema.data import DataConfig
    from megatrain.config.schema.tokenizer import TokenizerConfig
    from megatrain.config.user_function import UserFunction

_KEYS: Final = ("tokens", "labels", "loss_mask", "position_ids", "document_starts")


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """The samples that the function returns."""

    split: str
    """train, valid or test."""
    num_samples: int | None
    """Least number of samples; None: all (--full-validation)."""
    first_sample: int
    """Samples of the split before these: not 0 where a run was extended after it had planned its samples."""
    seed: int
    """--seed, and the next numbers for the samples of extended runs."""
    seq_length: int
    vocab_size: int
    eod: int | None
    """End-of-document id; None: not known."""
    data: DataConfig
    """All settings of the data."""
    tokenizer_config: TokenizerConfig

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded when it is first read. Raises ConfigError without --tokenizer-type."""
        return load_tokenizer(self.tokenizer_config)


def build_user_datasets(
    function: UserFunction,
    options: SampleOptions,
    plans: SamplePlans,
    data: DataConfig,
    tokenizer: TokenizerConfig,
) -> SplitDatasets:
    """Call the function for each split that the run reads. Where it returns None, the run does not evaluate.

    Raises:
        ConfigError: the function fails, or returns other samples than it is asked for.
    """
    assert options.vocab_size is not None
    request = DatasetRequest(
        split="train",
        num_samples=None,
        first_sample=0,
        seed=plans.seed,
        seq_length=options.seq_length,
        vocab_size=options.vocab_size,
        eod=options.eod,
        data=data,
        tokenizer_config=tokenizer,
    )
    call = function.load(data.dataset_digest)
    built: dict[str, SampleDataset | None] = {}
    for split in SPLIT_NAMES:
        counts, first = getattr(plans, split), 0
        parts: list[UserDataset] = []
        for number, count in enumerate(counts if counts != (0,) else ()):
            asked = replace(
                request, split=split, num_samples=count, first_sample=first, seed=plans.seed + number
            )
            try:
                samples = call(asked)
            except Exception as error:
                raise function.failure(error) from error
            if samples is None and split != "train" and not number:
                break
            parts.append(UserDataset(function, samples, asked, options))
            first += count or 0
        built[split] = parts[0] if len(parts) == 1 else PlannedDataset(parts, counts) if parts else None
    return SplitDatasets(built["train"], built["valid"], built["test"])


def first_digests(splits: SplitDatasets) -> list[str]:
    """Return the digests of the first samples of all plans, which must be the same on all ranks; none without --dataset."""
    datasets = (splits.train, splits.valid, splits.test)
    plans = [plan for one in datasets for plan in (one.plans if isinstance(one, PlannedDataset) else [one])]
    return [plan.first_digest for plan in plans if isinstance(plan, UserDataset)]


class UserDataset:
    """The samples that the function returned for a request."""

    def __init__(
        self, function: UserFunction, samples: Any, request: DatasetRequest, options: SampleOptions
    ) -> None:
        """Check the number of samples, and read the first one twice."""
        self._function, self._samples, self._request, self._options = function, samples, request, options
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise self._error(
                f"the function returned {type(samples).__name__}, which has no length or no items",
                "return an object with __len__ and __getitem__, such as a list",
            )
        needed = request.num_samples if request.data.dataloader_type == "single" else 1
        if len(samples) < (needed or 1):
            raise self._error(
                f"the function returned {len(samples)} samples, and the run needs {needed or 1}",
                "return request.num_samples samples or more, or add --dataloader-type cyclic to repeat them",
            )
        self.first_digest = self._digest(0)
        """Digest of the first sample."""
        if self._digest(0) != self.first_digest:
            raise self._error(
                f"sample {request.first_sample} differs when it is read again",
                "compute sample k from k and request.seed alone",
            )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._samples)

    def __getitem__(self, k: int) -> Sample:
        """Return sample k. Raises InputError if it is not valid."""
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        try:
            item = self._samples[k]
        except Exception as error:
            raise self._function.failure(error) from error
        if not isinstance(item, Mapping):
            item = {"tokens": item}
        unknown = [name for name in item if name not in _KEYS]
        if unknown or "tokens" not in item:
            raise self._of_sample(
                k,
                f"has the entries {', '.join(map(str, item))}",
                f"return tokens, and of {', '.join(_KEYS[1:])} what is needed",
            )
        length = self._options.seq_length
        has_labels = "labels" in item
        tokens = self._integers(k, "tokens", item["tokens"], length if has_labels else length + 1)
        self._check_ids(k, "tokens", tokens, lowest=0)
        labels = self._integers(k, "labels", item["labels"], length) if has_labels else tokens[1:]
        if has_labels:
            self._check_ids(k, "labels", labels, lowest=None)
        starts = np.zeros(1, np.int64)
        if "document_starts" in item:
            starts = self._starts(k, item["document_starts"])
        sample = make_sample(tokens[:length].copy(), labels, self._options, starts)
        if "loss_mask" in item:
            mask = self._array(k, "loss_mask", item["loss_mask"], length).astype(np.float32)
            if not np.isfinite(mask).all() or (mask < 0).any():
                raise self._of_sample(
                    k,
                    "has a loss_mask with values below 0 or not finite",
                    "use 1 where a label counts, else 0",
                )
            sample = replace(sample, loss_mask=sample.loss_mask * mask)
        if "position_ids" in item:
            positions = self._integers(k, "position_ids", item["position_ids"], length)
            if (positions < 0).any():
                raise self._of_sample(k, f"has position {positions.min()}", "count positions from 0 on")
            sample = replace(sample, position_ids=positions)
        return sample

    def spans(self, k: int) -> list[TokenSpan]:  # noqa: ARG002
        """See `SampleDataset`: the files are not known."""
        return []

    def _digest(self, k: int) -> str:
        sample, result = self[k], hashlib.sha256()
        for array in vars(sample).values():
            result.update(np.ascontiguousarray(array).data)
        return result.hexdigest()[:16]

    def _array(self, k: int, name: str, value: Any, length: int | None) -> npt.NDArray[Any]:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors on a GPU
            raise self._of_sample(
                k, f"has {name} that are no array: {error}", "return a list, an array, or a tensor on the CPU"
            ) from error
        if array.dtype.kind not in "biuf" or array.ndim != 1 or length not in (None, len(array)):
            wanted = f"[{length}]" if length is not None else "of one dimension"
            raise self._of_sample(
                k,
                f"has {name} of shape {list(array.shape)} and type {array.dtype.name}, not numbers {wanted}",
                f"return --seq-length {self._options.seq_length} values of each entry, and one more of tokens without"
                " labels",
            )
        return array

    def _integers(self, k: int, name: str, value: Any, length: int | None) -> npt.NDArray[np.int64]:
        array = self._array(k, name, value, length)
        if array.dtype.kind not in "iu":
            raise self._of_sample(k, f"has {name} of type {array.dtype.name}", "return whole numbers")
        return array.astype(np.int64)

    def _check_ids(self, k: int, name: str, ids: npt.NDArray[np.int64], *, lowest: int | None) -> None:
        size, is_pad = self._request.vocab_size, ids == self._options.pad
        wrong = (ids >= size) if lowest is None else (ids >= size) | (ids < lowest)
        wrong &= ~is_pad
        if wrong.any():
            place = int(np.argmax(wrong))
            raise self._of_sample(
                k,
                f"has id {ids[place]} in {name}[{place}], outside the vocabulary of {size}",
                "return ids below request.vocab_size; labels below 0 have no loss",
            )

    def _starts(self, k: int, value: Any) -> npt.NDArray[np.int64]:
        starts = self._integers(k, "document_starts", value, None)
        is_valid = len(starts) and starts[0] == 0 and starts[-1] < self._options.seq_length
        if not is_valid or (np.diff(starts) <= 0).any():
            raise self._of_sample(
                k,
                f"has document_starts {starts.tolist()[:8]}",
                "return ascending offsets that begin with 0",
            )
        if not self._options.inter_document_masking:
            raise self._of_sample(
                k,
                "has document_starts, which only --dataloader-inter-document-masking reads",
                "add --dataloader-inter-document-masking, or leave document_starts out",
            )
        return starts

    def _of_sample(self, k: int, problem: str, fix: str) -> InputError:
        error = self._error(f"sample {self._request.first_sample + k} {problem}", fix)
        return InputError(error.problems[0].text, fix=fix)

    def _error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(
            f"{self._function.flag} {self._function}: the {self._request.split} data: {problem}", fix=fix
        )
