"""Rules about data, tokenizers and the files on disk."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from megatrain.config.derive.data_plans import parse_transitions
from megatrain.config.derive.datasets import (
    SPLIT_NAMES,
    parse_blend,
    require_sequences,
    split_fractions,
    split_problems,
)
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan import Draft
from megatrain.config.schema.data import SOURCES
from megatrain.config.schema.tokenizer import TokenizerConfig, missing_end_of_document, tokenizer_problems
from megatrain.config.schema.tree import flag_of

Problems = Iterator[Problem]

MAX_SEED: Final = 2**32 - 1
"""Largest seed of the generator that shuffles samples."""
_PHASES: Final = "--phase-transition-iterations"
_PER_SPLIT: Final = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")


def given_sources(draft: Draft) -> list[str]:
    """Return the paths of the settings that name data."""
    return [path for path in SOURCES if draft.config.get(path)]


def data_has_one_source(draft: Draft) -> Problems:
    given = given_sources(draft)
    if not given:
        yield Problem(
            "there is no training data: neither --data-path nor --mock-data is given",
            "add --data-path PREFIX of a .bin and .idx pair (preprocess_data.py creates one), or --mock-data for synthetic data",
        )
    elif len(given) > 1 and not set(given) <= set(_PER_SPLIT):
        yield Problem(
            f"{' and '.join(map(flag_of, given))} each name the training data",
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


def blends_have_positive_weights(draft: Draft) -> Problems:
    for path in ("data.data_path", *_PER_SPLIT):
        try:
            parse_blend(draft.config.get(path), flag_of(path))
        except ConfigError as error:
            yield from error.problems


def split_is_valid(draft: Draft) -> Problems:
    yield from split_problems(draft.config.data.split)


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
    unit = "sequences" if draft.config.model.model_family == "gpt" else "documents"
    for is_later, required in ((False, is_required), (True, of_training)):
        read = {
            one.prefix: getattr(one, f"num_{unit}") for one in shared if bool(one.from_iteration) == is_later
        }
        try:
            require_sequences(split, read, required, unit=unit)
        except ConfigError as error:
            yield from error.problems


def data_schedule_has_an_order(draft: Draft) -> Problems:
    data = draft.config.data
    if data.data_schedule is None:
        return
    if data.mock_data:
        yield Problem(
            "--data-schedule replaces datasets, and --mock-data reads none", "remove --data-schedule"
        )
    if data.dataloader_type == "cyclic":
        yield Problem(
            "--data-schedule is not supported together with --dataloader-type cyclic, which repeats all samples",
            "remove --dataloader-type cyclic; datasets with weights are repeated as often as necessary",
        )


def phases_are_valid(draft: Draft) -> Problems:
    try:
        parse_transitions(draft.config.data.phase_transition_iterations)
    except ConfigError as error:
        yield from error.problems


def phases_need_datasets_in_order(draft: Draft) -> Problems:
    data, training = draft.config.data, draft.config.training
    if data.phase_transition_iterations is None:
        return
    if data.mock_data:
        yield Problem(f"{_PHASES} replaces datasets, and --mock-data reads none", f"remove {_PHASES}")
    if data.data_schedule is not None:
        yield Problem(
            f"{_PHASES} and --data-schedule both change the training data",
            f"remove --data-schedule, or {_PHASES}, since --data-schedule needs no restarts",
        )
    if data.dataloader_type == "cyclic":
        yield Problem(
            f"{_PHASES} is not supported together with --dataloader-type cyclic, which repeats all samples",
            "remove --dataloader-type cyclic; datasets with weights are repeated as often as necessary",
        )
    for name in ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"):
        if getattr(training, name):
            yield Problem(
                f"{_PHASES} counts samples as iterations * --global-batch-size, which {flag_of(name)} changes",
                f"remove {flag_of(name)}, or {_PHASES}; --data-schedule supports growing batches",
            )


def current_phase_is_kept(draft: Draft) -> Problems:
    stored, given = draft.facts.checkpoint, draft.derived.phase_transitions
    if stored is None or stored.is_of_megatron or draft.config.training.only_evaluates:
        return
    if stored.train_start != draft.derived.train_start and stored.iteration not in given:
        batch = draft.config.training.global_batch_size
        before, now = stored.train_start // batch, draft.derived.train_start // batch
        kept = {before, *(one for one in given if one > stored.iteration)} - {0}
        yield Problem(
            f"{_PHASES} cannot change before iteration {stored.iteration} of the checkpoint: its phase started after"
            f" iteration {before}, that of this run after {now}",
            (f"use {_PHASES} {','.join(map(str, sorted(kept)))}" if kept else f"remove {_PHASES}")
            + ", or add --finetune and another --save to start a new run from these weights",
        )


def phases_start_at_whole_batches(draft: Draft) -> Problems:
    stored, given = draft.facts.checkpoint, draft.derived.phase_transitions
    if stored is None or not given or draft.config.training.only_evaluates:
        return
    batch = draft.config.training.global_batch_size
    iteration, consumed = stored.iteration, stored.consumed_train_samples
    if iteration * batch != consumed:
        is_whole = iteration and not consumed % iteration
        yield Problem(
            f"{_PHASES} counts samples as iterations * --global-batch-size {batch}, but the checkpoint of iteration"
            f" {iteration} has consumed {consumed} samples",
            f"use --global-batch-size {consumed // iteration}"
            if is_whole
            else f"remove {_PHASES}; --data-schedule supports growing batches",
        )


def each_phase_has_other_data(draft: Draft) -> Problems:
    """The same data would be read again from its first sample on."""
    stored, start = draft.facts.checkpoint, draft.derived.train_start
    if stored is None or stored.train_start == start or draft.config.training.only_evaluates:
        return
    before, now = map(_training_data, (stored.datasets, draft.facts.datasets))
    if before and before == now:
        iteration = start // draft.config.training.global_batch_size
        yield Problem(
            f"{_PHASES}: a phase starts after iteration {iteration}, but the training data is that of the phase before,"
            " which would be read again from its first sample on",
            f"give the data of the new phase (--data-path), or remove {iteration} from {_PHASES}",
        )


def _training_data(datasets: Sequence[DatasetFacts]) -> list[tuple[Any, ...]]:
    return [(one.digest, one.weight, one.split) for one in datasets if one.split in ("all", "train")]


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


def document_ends_have_one_source(draft: Draft) -> Problems:
    data = draft.config.data
    if data.dataloader_inter_document_masking and (data.reset_attention_mask or data.reset_position_ids):
        yield Problem(
            "--dataloader-inter-document-masking uses the stored document boundaries, but --reset-attention-mask and"
            " --reset-position-ids use end-of-document tokens",
            "remove --dataloader-inter-document-masking, or --reset-attention-mask and --reset-position-ids",
        )


def functions_of_samples_are_alone(draft: Draft) -> Problems:
    data = draft.config.data
    if data.dataset is None:
        return
    reasons = {
        "data_schedule": "replaces datasets of files",
        "phase_transition_iterations": "replaces datasets of files",
        "sft": "reads conversations from files",
        "multiple_validation_sets": "evaluates on several datasets of files",
    }
    for name, reason in reasons.items():
        if getattr(data, name):
            yield Problem(
                f"{flag_of(name)} {reason}, and --dataset {data.dataset} has none", f"remove {flag_of(name)}"
            )


def conversations_are_whole(draft: Draft) -> Problems:
    data = draft.config.data
    if not data.sft:
        return
    if data.mock_data:
        yield Problem("--sft reads conversations, and --mock-data has none", "remove --sft, or --mock-data")
    names = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    given = [flag_of(name) for name in names if getattr(data, name)]
    if given:
        yield Problem(
            f"--sft has its own attention, positions and loss mask, and {' and '.join(given)} would change them",
            f"remove {' and '.join(given)}",
        )


def seed_is_in_range(draft: Draft) -> Problems:
    derived, seed = draft.derived, draft.config.training.seed
    plans = (derived.train_plan, derived.valid_plan, derived.test_plan)
    of_phases = sum(len(phase.plan) for phase in derived.later_phases)
    largest = MAX_SEED - max(map(len, plans)) - of_phases + 1  # each additional plan uses the next seed
    if seed > largest:
        yield Problem(f"--seed {seed} is too large for shuffling", f"use --seed {largest} or less")


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


def padded_vocabulary_holds_all_tokens(draft: Draft) -> Problems:
    rows, vocabulary = draft.config.model.padded_vocab_size, draft.derived.vocab_size
    if rows < vocabulary:
        yield Problem(
            f"--padded-vocab-size {rows} is too small for a vocabulary of {vocabulary} tokens",
            "remove --padded-vocab-size (or set it to auto), so that it is derived",
        )


DATA_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    data_has_one_source,
    blends_have_positive_weights,
    split_is_valid,
    splits_hold_sequences,
    data_schedule_has_an_order,
    phases_are_valid,
    phases_need_datasets_in_order,
    current_phase_is_kept,
    phases_start_at_whole_batches,
    each_phase_has_other_data,
    full_validation_excludes_weights,
    validation_sets_are_separate,
    document_ends_have_one_source,
    functions_of_samples_are_alone,
    conversations_are_whole,
    seed_is_in_range,
    vocabulary_is_known,
    end_of_document_is_known,
    padded_vocabulary_holds_all_tokens,
)
