"""Rules about checkpoints: which settings and data may differ from those of the checkpoint that a run resumes.

stored and current value of each setting ──> its class (`schema/resume_class.py`) ──> a note, or a problem with a remedy
datasets, their weights, the tokenizer   ──> compared by content             ──> a problem
schedules                                ──> compared by meaning             ──> a problem, unless a flag selects one
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from megatrain.config.errors import Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.fixes import Change, divisors, multiples, use, words
from megatrain.config.plan import Draft
from megatrain.config.schema.resume_class import (
    FUNCTION,
    OPTIMIZER_STATE,
    ORDER,
    SAFE,
    SCHEDULE,
    SHAPE,
    ResumeClass,
)
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.config.schema.training import HF_PREFIX
from megatrain.config.schema.tree import Config, Setting, settings
from megatrain.config.schema.values import is_resolved

_MAX_SHOWN: Final = 160
"""Maximum number of characters shown of a value."""
_BATCH, _MICRO = "training.global_batch_size", "training.micro_batch_size"
_NEW_RUN: Final = "add --finetune and another --save to start a new run from these weights"


def settings_match_checkpoint(draft: Draft) -> Iterator[Problem]:
    for setting, stored, now in _changes(draft):
        resume_class = _class_of(draft, setting, stored, now)
        kind = resume_class.kind
        if resume_class is SCHEDULE or kind not in ("consent", "refused") or _consent_to(draft, resume_class):
            continue
        if setting.path == "model.ffn_hidden_size" and _is_upcycled(draft):
            continue  # `upcycling_fits_the_dense_model` compares widths
        alternative = {
            "--finetune": "add --finetune and another --save to start a new run from these weights",
            "--no-load-optim": "add --no-load-optim to continue without the optimizer state",
        }.get(resume_class.consent, "start from scratch without --load and with another --save")
        yield Problem(
            f"{setting.flag} cannot change on resume, since {resume_class.reason}:"
            f" the checkpoint has {_with_unit(setting, stored)}, this run {_with_unit(setting, now)}",
            f"use the stored value ({_as_flag(setting, stored)}), or {alternative}",
        )


def _is_upcycled(draft: Draft) -> bool:
    return draft.facts.checkpoint is not None and draft.facts.checkpoint.is_upcycled


def upcycling_fits_the_dense_model(draft: Draft) -> Iterator[Problem]:
    experts, checkpoint, stored = draft.config.experts, draft.config.checkpoint, draft.facts.checkpoint
    if not experts.moe_use_upcycling or experts.num_experts is None:
        return
    if checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        yield Problem(
            "--moe-use-upcycling requires a dense model",
            "add --pretrained-checkpoint FOLDER with its checkpoint, and --load with the --save folder of this run",
        )
    if stored is None or not stored.is_upcycled:
        return
    load = checkpoint.load
    if load is not None and load == checkpoint.save and PurePath(load) in PurePath(stored.path).parents:
        yield Problem(
            f"--moe-use-upcycling would save into --save {checkpoint.save}, which has the dense model",
            "give --save another folder",
        )
    granularity, width = experts.moe_upcycling_granularity, experts.moe_ffn_hidden_size or 0
    dense = stored.config["model"]["ffn_hidden_size"]
    if dense != width * granularity:
        yield Problem(
            f"--moe-upcycling-granularity {granularity} * --moe-ffn-hidden-size {width} is not the dense model's"
            f" --ffn-hidden-size {dense}",
            f"use --moe-ffn-hidden-size {-(-dense // granularity)}, or --moe-ffn-hidden-size {dense}"
            " --moe-upcycling-granularity 1",
        )
    if experts.num_experts % granularity:
        yield Problem(
            f"--num-experts {experts.num_experts} is not divisible by --moe-upcycling-granularity {granularity}",
            use(draft, multiples("experts.num_experts", experts.num_experts, granularity)),
        )
    has_dense = any(layer.dense for layer in draft.derived.model_spec.layers)
    if has_dense and dense != draft.config.model.ffn_hidden_size:
        yield Problem(
            f"--ffn-hidden-size {draft.config.model.ffn_hidden_size} of layers without experts is not the dense model's"
            f" {dense}",
            f"use --ffn-hidden-size {dense}",
        )
    if experts.moe_latent_size is not None:
        yield Problem(
            "--moe-use-upcycling is not supported together with --moe-latent-size: the dense model has no projections",
            "remove one of them",
        )


def quantile_balancing_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    """Its biases are state of the model, and mean something else than other expert biases."""
    path, name = "experts.moe_router_load_balancing_type", "quantile_balancing"
    for changed, stored, now in _changes(draft):
        if changed.path == path and (name in stored) != (name in now):
            yield Problem(
                f"{changed.flag} cannot change to or from {name} on resume, since the model has biases of experts with it:"
                f" the checkpoint has {_as_text(stored)}, this run {_as_text(now)}",
                f"use the stored value ({_as_flag(changed, stored)})",
            )


def data_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    """Training files may move, but their contents, weights and order must not change, in any phase that has begun."""
    stored = draft.facts.checkpoint
    if stored is None or draft.config.training.only_evaluates:
        return
    fix = f"use the data of the stored run, or {_NEW_RUN}"
    before, now = (_trained_on(found, stored.iteration) for found in (stored.datasets, draft.facts.datasets))
    if not before or not now or stored.train_start != draft.derived.train_start:
        return  # without data, or at the start of a phase of --phase-transition-iterations
    if _begun(before) != _begun(now):
        return  # `data_schedule_matches_checkpoint` reports it
    if [dataset.split for dataset in before] != [dataset.split for dataset in now]:
        yield Problem(
            f"the data cannot change on resume, since the order of samples depends on it: the checkpoint read {len(before)}"
            f" datasets ({_counts(before)}), this run has {len(now)} ({_counts(now)})",
            fix,
        )
        return
    for former, dataset in zip(before, now, strict=True):
        if former.digest != dataset.digest:
            yield Problem(
                f"{dataset.prefix} is not the dataset that the checkpoint read ({former.prefix}), the contents differ: it has"
                f" {dataset.num_sequences} sequences with {dataset.num_tokens} tokens, and the other had"
                f" {former.num_sequences} with {former.num_tokens}",
                fix,
            )
        elif former.weight != dataset.weight:
            yield Problem(
                f"the weight of {dataset.prefix} cannot change on resume, since the order of samples depends on it:"
                f" the checkpoint has {_as_text(former.weight)}, this run {_as_text(dataset.weight)}",
                fix,
            )


def data_schedule_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    """Training data must have changed at the same iterations before that of the checkpoint."""
    stored = draft.facts.checkpoint
    if stored is None or draft.config.training.only_evaluates:
        return
    before, now = (_trained_on(found, stored.iteration) for found in (stored.datasets, draft.facts.datasets))
    if before and now and _begun(before) != _begun(now):
        listed = [", ".join(map(str, _begun(datasets))) or "none" for datasets in (before, now)]
        yield Problem(
            f"--data-schedule cannot change before iteration {stored.iteration} of the checkpoint: its data changed at"
            f" iterations {listed[0]}, that of this run at {listed[1]}",
            f"keep the entries before iteration {stored.iteration}, or {_NEW_RUN}",
        )


def _begun(datasets: Sequence[DatasetFacts]) -> list[int]:
    """Return the iterations at which the data changes."""
    return sorted({dataset.from_iteration for dataset in datasets} - {0})


def cyclic_pass_size_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    stored = draft.facts.checkpoint
    if draft.config.data.dataloader_type != "cyclic" or stored is None or stored.pass_size is None:
        return
    now = draft.config.training.micro_batch_size * draft.derived.data_parallel_size
    if now != stored.pass_size:
        yield Problem(
            f"--dataloader-type cyclic orders samples by micro-batch size * data-parallel size, which is {now} here and"
            f" {stored.pass_size} in the checkpoint",
            f"use --micro-batch-size * data-parallel size = {stored.pass_size}, or start from scratch with"
            " --dataloader-type single, whose order depends on neither",
        )


def _trained_on(datasets: Sequence[DatasetFacts], iteration: int) -> list[DatasetFacts]:
    """Return the training data of the phases that begin before an iteration."""
    return [
        dataset
        for dataset in datasets
        if dataset.split in ("all", "train")
        and (not dataset.from_iteration or dataset.from_iteration < iteration)
    ]


def _counts(datasets: Sequence[DatasetFacts]) -> str:
    counts = Counter(dataset.split for dataset in datasets)
    return ", ".join(f"{count} for {split}" for split, count in counts.items())


def tokenizer_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    stored, now = draft.facts.checkpoint, draft.facts.tokenizer_fingerprint
    before = stored.tokenizer_fingerprint if stored else None
    if before and now and not is_same_tokenizer(before, now):
        yield Problem(
            "--tokenizer-model cannot change on resume, since token ids would mean different text: the checkpoint has"
            f" fingerprint {before}, this run {now}",
            "use the tokenizer of the stored run, or start from scratch without --load and with another --save",
        )


def vocabulary_is_in_the_folder(draft: Draft) -> Iterator[Problem]:
    """Weights of transformers may have more rows than the tokenizer has tokens, and never fewer."""
    stored, size = draft.facts.checkpoint, draft.derived.vocab_size
    if stored is None or not stored.path.startswith(HF_PREFIX):
        return
    rows = stored.config["model"]["padded_vocab_size"]
    if size > rows:
        yield Problem(
            f"{stored.path}: its vocabulary has {rows} rows, and the tokenizer {size} tokens",
            f"use the tokenizer of the folder, or --vocab-size {rows}",
        )


def schedules_match_checkpoint(draft: Draft) -> Iterator[Problem]:
    """As in Megatron-LM, a change of the schedule on resume requires a flag."""
    stored = draft.facts.checkpoint
    if stored is None or stored.schedule is None or not draft.continues_optimizer:
        return
    if draft.config.schedule.override_opt_param_scheduler:
        return
    changes = draft.derived.schedule.changes(stored.schedule)
    if changes:
        differences = "; ".join(
            f"{name}: the checkpoint has {before}, this run {now}" for name, before, now in changes
        )
        own = draft.derived.schedule
        former = dataclasses.replace(own, **stored.schedule)
        yield Problem(
            f"the schedules differ from the checkpoint: {differences}\n  of the checkpoint: {former}\n  of this run: {own}",
            _batch_of_checkpoint(draft)
            + "add --override-opt-param-scheduler to use the schedules of this run, or"
            " --use-checkpoint-opt-param-scheduler to use those of the checkpoint",
        )


def schedule_of_checkpoint_is_available(draft: Draft) -> Iterator[Problem]:
    """No code is run that only a checkpoint names."""
    schedule, given = draft.derived.schedule, draft.config.schedule.lr_decay_style
    name = schedule.lr_decay_style
    if schedule.function is not None and given != name:
        yield Problem(
            f"the schedule of the checkpoint is the function {name}, and no code is run that only a checkpoint names",
            f"add --lr-decay-style {name} if you trust that code",
        )


def _batch_of_checkpoint(draft: Draft) -> str:
    """Return the start of a fix: the batch size with which the schedules are the checkpoint's, if that is what changed."""
    training, dp = draft.config.training, draft.derived.data_parallel_size
    stored = draft.facts.checkpoint.config.get("training", {}) if draft.facts.checkpoint else {}
    batch, micro = (stored.get(name) for name in ("global_batch_size", "micro_batch_size"))
    if batch in (None, training.global_batch_size):
        return ""
    candidates: list[Change] = [{_BATCH: batch}]
    if micro != training.micro_batch_size and not draft.is_given(_BATCH):
        candidates.insert(0, {_MICRO: micro})
    smaller = divisors(_MICRO, batch // dp, training.micro_batch_size) if batch % dp == 0 else ()
    candidates += [{**change, _BATCH: batch} for change in smaller]
    fitting = next((change for change in candidates if draft.breaks(change) == 0), None)
    return f"use {words(fitting)}, which keeps the schedules of the checkpoint, or " if fitting else ""


def checkpoint_has_optimizer_state(draft: Draft) -> Iterator[Problem]:
    stored = draft.facts.checkpoint
    if stored is not None and not stored.has_optimizer and draft.continues_optimizer:
        reason = "since it was saved with --no-save-optim"
        if stored.is_of_megatron:
            reason = (
                "or it is stored by buckets, whose order only Megatron-LM knows: save once more there with --ckpt-format torch_dist"
                " --dist-ckpt-optim-fully-reshardable, or continue without it"
            )
        yield Problem(
            f"{stored.path} has no optimizer state, {reason}",
            "add --finetune to start a new run from its weights, or --no-load-optim to continue without the optimizer state",
        )


def changed_settings(draft: Draft) -> Iterator[str]:
    """Yield one note per class of change since the checkpoint, with changes such as `--lr 0.001 -> 0.002`."""
    by_label: dict[str, list[str]] = {}
    for setting, stored, now in _changes(draft):
        resume_class = _class_of(draft, setting, stored, now)
        if resume_class.kind == "silent" or (
            resume_class is SCHEDULE and draft.config.schedule.use_checkpoint_opt_param_scheduler
        ):
            continue
        consent = _consent_to(draft, resume_class) if resume_class.kind == "consent" else ""
        label = f"allowed by {consent}" if consent else "safe"
        change = f"{setting.flag} {_as_text(stored)} -> {_with_unit(setting, now)}"
        by_label.setdefault(label, []).append(change)
    for label, changes in by_label.items():
        yield f"changed since the checkpoint, {label}: {', '.join(changes)}"


def _changes(draft: Draft) -> Iterator[tuple[Setting, Any, Any]]:
    """Yield setting, stored and current value of changed settings. Settings that an older version did not store are skipped."""
    checkpoint = draft.facts.checkpoint
    stored, is_of_megatron = (checkpoint.config, checkpoint.is_of_megatron) if checkpoint else ({}, False)
    for setting in settings():
        now = draft.config.raw(setting.path)
        if setting.name not in stored.get(setting.section, {}) or not is_resolved(now):
            continue
        now = list(now) if isinstance(now, tuple) else now
        before = stored[setting.section][setting.name]
        # Rows of padding are no tokens for this program: loading compares the rows that are left. Fewer tokens are a change.
        is_padding = (
            is_of_megatron and setting.path == "tokenizer.vocab_size" and (not before or now >= before)
        )
        if before != now and not is_padding:
            yield setting, before, now


def _class_of(draft: Draft, setting: Setting, stored: Any, now: Any) -> ResumeClass:
    is_learned = draft.config.model.position_embedding_type == "learned_absolute"
    if setting.path == "model.max_position_embeddings" and is_learned:
        return SHAPE
    if setting.path == "data.dataset" and None not in (stored, now):
        return SAFE  # the file may move: its digest is compared
    has_weights = setting.adapts(stored, now) or _takes_new_tokens(draft, setting.path)
    return FUNCTION if has_weights else setting.on_resume


def adapted_settings(config: Config, stored: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the paths of changed settings for which the weights of the stored configuration are adapted."""
    found = set()
    for setting in settings():
        now = config.raw(setting.path)
        before = stored.get(setting.section, {}).get(setting.name, now)
        if before != now and setting.adapts(before, now):
            found.add(setting.path)
    return frozenset(found)


def _takes_new_tokens(draft: Draft, path: str) -> bool:
    """Return whether the checkpoint has rows of padding for all new tokens, as Megatron-LM requires."""
    checkpoint = draft.facts.checkpoint
    if path != "tokenizer.vocab_size" or checkpoint is None:
        return False
    tokens = checkpoint.config["tokenizer"]["vocab_size"] or 0
    rows: int = checkpoint.config["model"].get("padded_vocab_size", 0)
    return bool(tokens < draft.derived.vocab_size <= rows)


def _consent_to(draft: Draft, resume_class: ResumeClass) -> str:
    """Return the given flag that allows changes of this class; empty: none."""
    stored = draft.facts.checkpoint
    of_evaluation = "--eval-only" if draft.config.training.eval_only else "--skip-train"
    if resume_class is SCHEDULE and not draft.derived.schedule.changes((stored and stored.schedule) or {}):
        return ""  # different settings, same schedule
    if resume_class is ORDER and draft.config.training.only_evaluates:
        return of_evaluation
    if resume_class is SCHEDULE and draft.config.schedule.override_opt_param_scheduler:
        return resume_class.consent
    if resume_class in (SCHEDULE, OPTIMIZER_STATE) and not draft.continues_optimizer:
        return of_evaluation if draft.config.training.only_evaluates else "--no-load-optim"
    if resume_class.consent == "--finetune" and stored is not None and stored.is_start:
        return _flag_of_start(draft)
    return ""


def _flag_of_start(draft: Draft) -> str:
    """Return the flag that names the weights from which the run starts."""
    checkpoint = draft.config.checkpoint
    if (checkpoint.load or "").startswith(HF_PREFIX):
        return "--load hf:"
    return "--finetune" if checkpoint.finetune else "--pretrained-checkpoint"


def _with_unit(setting: Setting, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{_as_text(value)} {setting.unit}".rstrip() if is_number else _as_text(value)


def _as_text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _as_flag(setting: Setting, value: Any) -> str:
    """Return the command-line form of a value."""
    flag = setting.flag
    if isinstance(value, bool):
        return flag if value else f"without {flag}"
    return f"without {flag}" if value is None or value == [] else f"{flag} {_as_text(value)}"


def missing_checkpoint_has_one_answer(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    if checkpoint.load_or_start and checkpoint.exit_on_missing_checkpoint:
        yield Problem(
            "--load-or-start and --exit-on-missing-checkpoint contradict each other", "remove one of them"
        )


RESUME_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    settings_match_checkpoint,
    upcycling_fits_the_dense_model,
    quantile_balancing_matches_checkpoint,
    data_matches_checkpoint,
    data_schedule_matches_checkpoint,
    cyclic_pass_size_matches_checkpoint,
    tokenizer_matches_checkpoint,
    vocabulary_is_in_the_folder,
    schedules_match_checkpoint,
    schedule_of_checkpoint_is_available,
    checkpoint_has_optimizer_state,
    missing_checkpoint_has_one_answer,
)
