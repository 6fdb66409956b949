"""The data: its sources, their split, documents, and the vocabulary."""

from __future__ import annotations

import itertools
import os.path
from collections import Counter
from typing import Final

from megatrain.config.derive.datasets import (
    SPLIT_NAMES,
    parse_blend,
    require_sequences,
    split_fractions,
    split_problems,
)
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.plan import DerivedValue, Draft
from megatrain.config.registry import Notes, Problems, derives, note, overrides, rule, unproven
from megatrain.config.schema.data import MASKED_FAMILIES, SOURCES
from megatrain.config.schema.tokenizer import TokenizerConfig, missing_end_of_document, tokenizer_problems
from megatrain.config.schema.tree import flag_of
from megatrain.config.schema.values import UnresolvedError

_PER_SPLIT: Final = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")


def given_sources(draft: Draft) -> list[str]:
    """Return the paths of the settings that name data."""
    return [path for path in SOURCES if draft.config.get(path)]


@rule
def data_has_one_source(draft: Draft) -> Problems:
    given = given_sources(draft)
    if not given:
        yield Problem(
            "there is no training data: neither --data-path nor --mock-data is given",
            "add --data-path with text, such as corpus.jsonl, or the prefix of a .bin and .idx pair, or --mock-data for synthetic data",
        )
    elif len(given) > 1 and not set(given) <= set(_PER_SPLIT):
        yield Problem(
            f"{' and '.join(map(flag_of, given))} each name data",
            "keep one of them (only --train-data-path, --valid-data-path and --test-data-path can be combined)",
        )
    elif (
        set(given) <= set(_PER_SPLIT)
        and "data.train_data_path" not in given
        and not draft.config.training.only_evaluates
    ):
        yield Problem("there is no training data: --train-data-path is not given", "add --train-data-path")
    elif (
        "data.per_split_data_args_path" in given
        and not draft.facts.data_problems
        and draft.facts.datasets
        and not any(one.split == "train" and not one.from_iteration for one in draft.facts.datasets)
        and not draft.config.training.only_evaluates
    ):
        yield Problem(
            f"there is no training data: --per-split-data-args-path {draft.config.data.per_split_data_args_path}"
            " has no data for train",
            'add {"train": [...]} to the file',
        )


@rule
def blends_have_positive_weights(draft: Draft) -> Problems:
    for path in ("data.data_path", *_PER_SPLIT):
        try:
            parse_blend(draft.config.get(path), flag_of(path))
        except ConfigError as error:
            yield from error.problems


@derives("data.split")
def split(draft: Draft) -> DerivedValue:
    if draft.config.data.mock_data:
        return DerivedValue("1,1,1", "fixed for mock data")
    if any(draft.config.get(path) for path in _PER_SPLIT):
        return DerivedValue("969, 30, 1", "not read: data are given by split")
    reason = "--dataset does not read it" if draft.config.data.dataset else "Megatron-LM's default for files"
    return DerivedValue("969, 30, 1", reason)


@overrides("data.split")
def even_split_of_mock_data(draft: Draft) -> DerivedValue | None:
    """Override --split for mock data; a split that is not valid stays, and is reported."""
    given = draft.config.data.split
    if not draft.config.data.mock_data or given == "1,1,1" or split_problems(given):
        return None
    return DerivedValue(
        "1,1,1", f"--split {given} has no effect: mock data is split 1,1,1, as in Megatron-LM"
    )


@rule
def split_is_valid(draft: Draft) -> Problems:
    yield from split_problems(draft.config.data.split)


@note("nothing")
def split_has_no_effect(draft: Draft) -> Notes:
    is_separate = any(dataset.split != "all" for dataset in draft.facts.datasets)
    if is_separate and draft.is_given("data.split"):
        yield f"--split {draft.config.data.split} has no effect, since each split has its own data"


@rule
def splits_hold_sequences(draft: Draft) -> Problems:
    shared = [dataset for dataset in draft.facts.datasets if dataset.split == "all"]
    if not shared or split_problems(draft.config.data.split):
        return
    split = draft.config.data.split
    plans = (draft.derived.train_plan, draft.derived.valid_plan, draft.derived.test_plan)
    # As in Megatron-LM, `--split 100,0,0` disables evaluation, regardless of --eval-iters.
    is_required = [
        plan != (0,) and (share > 0 or (name == "train" and not draft.config.training.only_evaluates))
        for name, share, plan in zip(SPLIT_NAMES, split_fractions(split), plans, strict=True)
    ]
    of_training = [is_required[0], False, False]
    unit = "documents" if draft.config.model.model_family in MASKED_FAMILIES else "sequences"
    for is_later, required in ((False, is_required), (True, of_training)):
        read = {
            one.prefix: getattr(one, f"num_{unit}") for one in shared if bool(one.from_iteration) == is_later
        }
        try:
            require_sequences(split, read, required, unit=unit)
        except ConfigError as error:
            yield from error.problems


@note("result")
def datasets_are_duplicated(draft: Draft) -> Notes:
    keys = [(one.from_iteration, one.split, one.digest) for one in draft.facts.datasets]
    counts = Counter(keys)
    duplicates = {one.prefix for one, key in zip(draft.facts.datasets, keys, strict=True) if counts[key] > 1}
    if duplicates:
        yield f"{', '.join(sorted(duplicates))}: the same data is given more than once, and its samples are repeated"


@derives("data.data_cache_path")
def data_cache_path(draft: Draft) -> DerivedValue:
    if not draft.facts.datasets:
        is_text = bool(draft.facts.untokenized)
        return DerivedValue(
            None, "next to the text, once it is tokenized" if is_text else "there are no files"
        )
    if "://" in draft.facts.datasets[0].prefix:
        folder = draft.config.data.object_storage_cache_path or "."
        return DerivedValue(os.path.join(folder, "index_cache"), "in --object-storage-cache-path")  # noqa: PTH118
    folder = os.path.dirname(draft.facts.datasets[0].prefix)  # noqa: PTH120 (a path such as `./a` stays as it is)
    return DerivedValue(os.path.join(folder, "index_cache"), "next to the first dataset")  # noqa: PTH118


@note("cost")
def text_is_tokenized_first(draft: Draft) -> Notes:
    for text in dict.fromkeys(itertools.chain(*draft.facts.untokenized.values())):
        yield f"{text} is tokenized at the first start, or in advance by `megatrain data index`"


@unproven("result")
def order_of_cyclic_samples(draft: Draft) -> Notes:
    if draft.config.data.dataloader_type == "cyclic":
        yield (
            "--dataloader-type cyclic orders samples by the number of replicas, as in Megatron-LM: each of them shuffles its"
            " part, or with --no-data-sharding takes every so many samples of a micro-batch"
        )


@rule
def full_validation_excludes_weights(draft: Draft) -> Problems:
    is_weighted = any(
        dataset.weight is not None and dataset.split in ("all", "valid") and not dataset.from_iteration
        for dataset in draft.facts.datasets
    )
    if draft.config.data.full_validation and is_weighted and not draft.config.data.multiple_validation_sets:
        yield Problem(
            "--full-validation reads all validation data, which excludes weights of validation data",
            "remove --full-validation, or the weights, or add --multiple-validation-sets",
        )


@rule
def validation_sets_are_separate(draft: Draft) -> Problems:
    data = draft.config.data
    if not data.multiple_validation_sets:
        return
    if not data.full_validation:
        yield Problem(
            "--multiple-validation-sets requires --full-validation, since each set is read completely",
            "add --full-validation",
        )
    if draft.facts.datasets and not any(dataset.split == "valid" for dataset in draft.facts.datasets):
        yield Problem(
            "--multiple-validation-sets requires separate validation data",
            "name the sets with --valid-data-path or --per-split-data-args-path",
        )
    names, sets = data.validation_set_names, [one for one in draft.facts.datasets if one.split == "valid"]
    if names and sets and (len(names) != len(sets) or len(set(names)) < len(names)):
        yield Problem(
            f"--validation-set-names {' '.join(names)} does not name the {len(sets)} validation sets one by one",
            f"use --validation-set-names {' '.join(f'set{number}' for number in range(1, len(sets) + 1))}",
        )


@note("result")
def loss_masks_are_not_read(draft: Draft) -> Notes:
    masked = [one.prefix for one in draft.facts.datasets if one.has_loss_mask]
    if masked and not draft.config.data.sft:
        yield (
            f"{', '.join(dict.fromkeys(masked))}: conversations with a loss mask next to them, which is not read without"
            " --sft: prompts have loss, too"
        )


@note("result")
def chat_templates_differ(draft: Draft) -> Notes:
    by_template: dict[str, str] = {}
    for one in draft.facts.datasets:
        if one.chat_template is not None:
            by_template.setdefault(one.chat_template, one.prefix)
    if len(by_template) > 1:
        first = next(iter(by_template.values()))
        yield (
            f"{', '.join(by_template.values())}: conversations of different chat templates; chats with the model and its"
            f" exports have that of {first}"
        )


@derives("derived.vocab_size")
def vocab_size(draft: Draft) -> DerivedValue:
    given, found = draft.config.tokenizer.vocab_size, draft.facts.vocab_size
    if found is not None and found >= (given or 0):
        return DerivedValue(found, "the tokenizer's")
    if given is None:
        raise UnresolvedError  # The rule `vocabulary_is_known` reports it.
    return DerivedValue(
        given, "--vocab-size" if found is None else f"--vocab-size: the tokenizer's {found}, and padding"
    )


@rule
def vocabulary_is_known(draft: Draft) -> Problems:
    tokenizer, facts = draft.config.tokenizer, draft.facts
    has_only_size = tokenizer == TokenizerConfig(vocab_size=tokenizer.vocab_size)
    has_files = not (draft.config.data.mock_data or draft.config.data.dataset)
    if has_only_size and tokenizer.vocab_size is not None and not has_files:
        return
    problems = list(tokenizer_problems(tokenizer))
    yield from problems
    is_read = facts.vocab_size is not None or tokenizer.tokenizer_type == "NullTokenizer"
    if not (problems or is_read or facts.data_problems):
        yield Problem(
            f"--tokenizer-type {tokenizer.tokenizer_type}: its vocabulary size is unknown",
            "check that its files can be read",
        )


@derives("derived.eod_id")
def eod_id(draft: Draft) -> DerivedValue:
    if draft.facts.vocab_size is not None or draft.facts.eod_id is not None:
        reason = "the tokenizer has none" if draft.facts.eod_id is None else "the tokenizer's"
        return DerivedValue(draft.facts.eod_id, reason)
    given = draft.config.tokenizer.null_tokenizer_eod_id
    if given is not None:
        return DerivedValue(given, "--null-tokenizer-eod-id")
    return DerivedValue(draft.derived.vocab_size - 1, "the last token, as there is no tokenizer file")


@rule
def end_of_document_is_known(draft: Draft) -> Problems:
    data = draft.config.data
    needs = {
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--mock-data": data.mock_data,
    }
    for flag, is_on in needs.items():
        if is_on and draft.derived.eod_id is None:
            yield missing_end_of_document(draft.config.tokenizer, needed_by=flag)


@note("result")
def end_of_document_was_guessed(draft: Draft) -> Notes:
    data = draft.config.data
    if draft.facts.tokenizer_note and (
        data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    ):
        yield draft.facts.tokenizer_note


@derives("model.padded_vocab_size")
def padded_vocab_size(draft: Draft) -> DerivedValue:
    vocabulary, tp = draft.derived.vocab_size, draft.config.parallel.tensor_model_parallel_size
    multiple = draft.config.model.make_vocab_size_divisible_by
    rows = padded_vocabulary(vocabulary, divisible_by=multiple, tp_size=tp)
    return DerivedValue(rows, f"{vocabulary} up to a multiple of {multiple} * tp {tp}")


def padded_vocabulary(vocab_size: int, *, divisible_by: int, tp_size: int) -> int:
    """Return the rows of the embedding: each tensor-parallel rank holds a multiple of `divisible_by`."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


@rule
def vocabulary_is_the_tokenizers(draft: Draft) -> Problems:
    """--vocab-size counts the rows of padding in the softmax, as Megatron-LM does. More of them are a mistake, unless a checkpoint has them."""
    found, tokens, model = draft.facts.vocab_size, draft.derived.vocab_size, draft.config.model
    if found is None or tokens <= found or draft.facts.checkpoint is not None:
        return
    tp = draft.config.parallel.tensor_model_parallel_size
    rows = padded_vocabulary(found, divisible_by=model.make_vocab_size_divisible_by, tp_size=tp)
    if tokens > rows and not draft.is_given_or_stored("model.padded_vocab_size"):
        yield Problem(
            f"--vocab-size {tokens} differs from the size of the tokenizer, {found}, and from its {rows} rows with padding",
            f"leave --vocab-size out, use --vocab-size {rows} to count the rows of padding in the softmax, as Megatron-LM does, or"
            " set the rows of the embedding with --padded-vocab-size",
        )


@rule
def padded_vocabulary_holds_all_tokens(draft: Draft) -> Problems:
    rows, vocabulary = draft.config.model.padded_vocab_size, draft.derived.vocab_size
    if rows < vocabulary:
        yield Problem(
            f"--padded-vocab-size {rows} is too small for a vocabulary of {vocabulary} tokens",
            "remove --padded-vocab-size (or set it to auto), so that it is derived",
        )
