"""Which settings and data may differ from those of the checkpoint that a run resumes.

stored and current value of each setting ──> its class (`schema/resume_class.py`) ──> a note, or a problem with a remedy
datasets, their weights, the tokenizer   ──> compared by content             ──> a problem
schedules                                ──> compared by meaning (`schedule.py`) ──> a problem, unless a flag selects one
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from megatrain.config.errors import Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.fixes import Change
from megatrain.config.plan import Draft
from megatrain.config.registry import Notes, Problems, note, rule
from megatrain.config.schema.resume_class import (
    FUNCTION,
    LOSS,
    OPTIMIZER_STATE,
    ORDER,
    SAFE,
    SCHEDULE,
    SHAPE,
    STEPS,
    ResumeClass,
)
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.config.schema.training import HF_PREFIX
from megatrain.config.schema.tree import Config, Setting, in_words, settings
from megatrain.config.schema.values import is_resolved

_MAX_SHOWN: Final = 160
"""Maximum number of characters shown of a value."""
_MAX_WEIGHTS: Final = 8
"""Maximum number of weights shown."""
_BALANCING: Final = "experts.moe_router_load_balancing_type"
_NEW_RUN: Final = "add --finetune and another --save to start a new run from these weights"


@rule
def settings_match_checkpoint(draft: Draft) -> Problems:
    checkpoint = draft.facts.checkpoint
    for setting, stored, now, resume_class in _judged(draft):
        kind = resume_class.kind
        if resume_class is SCHEDULE or kind not in ("consent", "refused") or _consent_to(draft, resume_class):
            continue
        if setting.path == "model.ffn_hidden_size" and checkpoint and checkpoint.is_upcycled:
            continue  # `upcycling_fits_the_dense_model` compares widths
        alternative = {
            "--finetune": _NEW_RUN,
            "--no-load-optim": "add --no-load-optim to continue without the optimizer state",
        }.get(resume_class.consent, _from_scratch(draft))
        if setting.path == "adapters.lora_rank" and stored is not None and checkpoint:
            alternative = (
                f"merge the adapters (megatrain checkpoint merge-lora {checkpoint.path} TARGET) and start a new run from"
                " them (--pretrained-checkpoint TARGET, another --save and --load)"
            )
        change = (
            "differ from that of the weights" if checkpoint and checkpoint.is_start else "change on resume"
        )
        yield Problem(
            f"{setting.flag} cannot {change}, since {resume_class.reason}:"
            f" the checkpoint has {_with_unit(setting, stored)}, this run {_with_unit(setting, now)}",
            f"use the stored value ({_as_flag(setting, stored)}){_in_pieces(draft, setting, stored, now)}, or {alternative}",
        )


def _from_scratch(draft: Draft) -> str:
    """Return the fix of a run that cannot use the weights of the checkpoint."""
    checkpoint = draft.facts.checkpoint
    is_pretrained = checkpoint and checkpoint.is_start and _flag_of_start(draft) == "--pretrained-checkpoint"
    flag = "--pretrained-checkpoint" if is_pretrained else "--load"
    return f"start from scratch without {flag} and with another --save"


def _in_pieces(draft: Draft, setting: Setting, stored: Any, now: Any) -> str:
    """Return the part of a fix that cuts the stored samples to the shorter length of this run."""
    if setting.path != "data.seq_length" or now > stored or stored % now:
        return ""
    change: Change = {"data.seq_length": stored, "data.seq_length_schedule": f"0:{now}"}
    return "" if draft.breaks(change) else f" and add --seq-length-schedule 0:{now}, which cuts its samples"


@note("result")
def changed_settings(draft: Draft) -> Notes:
    """Yield one note per class of change since the checkpoint, with changes such as `--lr 0.001 -> 0.002`."""
    by_label: dict[str, list[str]] = {}
    for setting, stored, now, resume_class in _judged(draft):
        kind = resume_class.kind
        if kind == "silent" or (
            resume_class is SCHEDULE and draft.config.schedule.use_checkpoint_opt_param_scheduler
        ):
            continue
        consent = _consent_to(draft, resume_class) if kind == "consent" else ""
        unasked = "so that later steps may compute something else" if kind == "noted" else "safe"
        label = f"allowed by {consent}" if consent else unasked
        change = f"{setting.flag} {_as_text(stored)} -> {_with_unit(setting, now)}"
        by_label.setdefault(label, []).append(change)
    for label, changes in by_label.items():
        yield f"changed since the checkpoint, {label}: {', '.join(changes)}"


@rule
def balancing_matches_checkpoint(draft: Draft) -> Problems:
    """Biases of experts are state of the model, and the scores of sinkhorn another function of the weights."""
    reasons = {"quantile_balancing": "the model has biases of experts with it"}
    if not _consent_to(draft, FUNCTION):
        reasons["sinkhorn"] = "its scores are another function of the router's weights"
    for changed, stored, now in _changes(draft) if draft.config.experts.num_experts else ():
        for name, reason in reasons.items():
            if changed.path == _BALANCING and (name in stored) != (name in now):
                other = f", or {_NEW_RUN}" if name == "sinkhorn" else ""
                yield Problem(
                    f"{changed.flag} cannot change to or from {name} on resume, since {reason}:"
                    f" the checkpoint has {_as_text(stored)}, this run {_as_text(now)}",
                    f"use the stored value ({_as_flag(changed, stored)}){other}",
                )


@rule
def data_matches_checkpoint(draft: Draft) -> Problems:
    """Training files may move, but their contents, weights and order must not change, in any phase that has begun."""
    stored = draft.facts.checkpoint
    if stored is None or draft.config.training.only_evaluates:
        return
    fix = f"use the data of the stored run (--data-schedule changes it from a later iteration on), or {_NEW_RUN}"
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
                f" {dataset.size}, and the other had {former.size}",
                fix,
            )
    weights = [
        f"{dataset.prefix} {_as_text(former.weight)} -> {_as_text(dataset.weight)}"
        for former, dataset in zip(before, now, strict=True)
        if former.weight != dataset.weight
    ]
    if weights:
        more = f", and {len(weights) - _MAX_WEIGHTS} more" if len(weights) > _MAX_WEIGHTS else ""
        yield Problem(
            "weights of datasets cannot change on resume, since the order of samples depends on them:"
            f" {', '.join(weights[:_MAX_WEIGHTS])}{more}",
            fix,
        )


@rule
def data_schedule_matches_checkpoint(draft: Draft) -> Problems:
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


@rule
def cyclic_pass_size_matches_checkpoint(draft: Draft) -> Problems:
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


@rule
def tokenizer_matches_checkpoint(draft: Draft) -> Problems:
    stored, now = draft.facts.checkpoint, draft.facts.tokenizer_fingerprint
    before = stored.tokenizer_fingerprint if stored else None
    if before and now and not is_same_tokenizer(before, now):
        yield Problem(
            "--tokenizer-model cannot change on resume, since token ids would mean different text: the checkpoint has"
            f" fingerprint {before}, this run {now}",
            f"use the tokenizer of the stored run, or {_from_scratch(draft)}",
        )


def _changes(draft: Draft) -> Iterator[tuple[Setting, Any, Any]]:
    """Yield setting, stored and current value of changed settings. Settings that an older version did not store are skipped."""
    checkpoint = draft.facts.checkpoint
    if checkpoint is None:
        return
    stored, is_of_megatron = checkpoint.config, checkpoint.is_of_megatron
    for setting in settings():
        now = draft.config.raw(setting.path)
        if setting.name not in stored.get(setting.section, {}) or not is_resolved(now):
            continue
        now = list(now) if isinstance(now, tuple) else now
        before = stored[setting.section][setting.name]
        if setting.path == "tokenizer.vocab_size" and before is not None and now is None:
            now = draft.derived.vocab_size
        # Rows of padding are no tokens for this program: loading compares the rows that are left. Fewer tokens are a change.
        is_padding = (
            is_of_megatron and setting.path == "tokenizer.vocab_size" and (not before or now >= before)
        )
        if before != now and not is_padding:
            yield setting, before, now


def _judged(draft: Draft) -> Iterator[tuple[Setting, Any, Any, ResumeClass]]:
    """Yield changes with their class. All of the model are safe if they leave it the same: spelled otherwise, or without effect."""
    checkpoint = draft.facts.checkpoint
    changes, stored_config = list(_changes(draft)), checkpoint.config if checkpoint else {}
    of_model = {
        setting.path: stored_config[setting.section][setting.name]
        for setting in settings()
        if setting.on_resume in (SHAPE, FUNCTION) and setting.name in stored_config.get(setting.section, {})
    }
    is_same = any(one.path in of_model for one, *_ in changes) and draft.is_same_model(of_model)
    for setting, stored, now in changes:
        is_safe = is_same and setting.path in of_model
        yield setting, stored, now, SAFE if is_safe else _class_of(draft, setting, stored, now)


def _class_of(draft: Draft, setting: Setting, stored: Any, now: Any) -> ResumeClass:
    is_learned = draft.config.model.position_embedding_type == "learned_absolute"
    if setting.path == "model.max_position_embeddings" and is_learned:
        return SHAPE
    if setting.may_move and None not in (stored, now):
        return STEPS
    has_weights = setting.adapts(stored, now) or _takes_new_tokens(draft, setting.path)
    resume_class = FUNCTION if has_weights else setting.on_resume
    if resume_class.kind == "consent" and not all(need.holds(draft.get) for need in setting.needs):
        return SAFE  # without effect; what it needs is compared itself
    return resume_class


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
    if resume_class in (LOSS, ORDER) and draft.config.training.only_evaluates:
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
    text = in_words(value)
    if isinstance(value, list) or len(text) <= _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _as_flag(setting: Setting, value: Any) -> str:
    """Return the command-line form of a value."""
    flag = setting.flag
    if isinstance(value, bool):
        return flag if value else f"without {flag}"
    return f"without {flag}" if value is None or value == [] else f"{flag} {_as_text(value)}"
