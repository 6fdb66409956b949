"""A run that continues a checkpoint: what changed since, and what may not.

stored and present value of each setting ──> its class (`resume_classes.py`) ──> a note, or a problem with its way out
files, their weights and the tokenizer   ──> compared by content             ──> a problem
schedules                                ──> compared by what they mean      ──> a problem, until a flag says which
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from megatrain.config.errors import Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.plan import Draft
from megatrain.config.rules.resume_classes import (
    OPTIMIZER_STATE,
    SCHEDULE,
    SHAPE,
    ResumeClass,
    classes_by_path,
)
from megatrain.config.schema.tree import flag_of, settings, unit_of
from megatrain.config.schema.values import is_resolved

_LONGEST: Final = 160
"""Characters of a value that are shown."""


def settings_match_checkpoint(draft: Draft) -> Iterator[Problem]:
    for path, stored, now in _changes(draft):
        of = _class_of(draft, path)
        if of is SCHEDULE or of.kind not in ("consent", "refused") or _consent_to(draft, of):
            continue
        way_out = {
            "--finetune": "add --finetune and another --save to begin a new run with these weights",
            "--no-load-optim": "add --no-load-optim to go on without the optimizer's state",
        }.get(of.consent, "start a fresh run without --load and with another --save")
        yield Problem(
            f"{flag_of(path)} cannot change on resume, {of.reason}:"
            f" the checkpoint has {_shown(path, stored)}, this run {_shown(path, now)}",
            f"keep the stored value ({_spelled(path, stored)}), or {way_out}",
        )


def data_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    """Training files may move; what is in them, their weights and their order may not change."""
    stored = draft.facts.checkpoint
    if stored is None:
        return
    fix = "give the data of the first run, or start a fresh run without --load and with another --save"
    before, now = _trained_on(stored.datasets), _trained_on(draft.facts.datasets)
    if not before or not now:
        return
    if [dataset.split for dataset in before] != [dataset.split for dataset in now]:
        yield Problem(
            f"the data cannot change on resume, the order of samples depends on it: the checkpoint read {len(before)}"
            f" datasets ({_splits(before)}), this run names {len(now)} ({_splits(now)})",
            fix,
        )
        return
    for former, dataset in zip(before, now, strict=True):
        if former.digest != dataset.digest:
            yield Problem(
                f"{dataset.prefix} is not the dataset that the checkpoint read ({former.prefix}): it has"
                f" {dataset.num_sequences} sequences of {dataset.num_tokens} tokens, that one had"
                f" {former.num_sequences} of {former.num_tokens}, and the contents differ",
                fix,
            )
        elif former.weight != dataset.weight:
            yield Problem(
                f"the weight of {dataset.prefix} cannot change on resume, the order of samples depends on it:"
                f" the checkpoint has {_bare(former.weight)}, this run {_bare(dataset.weight)}",
                fix,
            )


def cyclic_pass_size_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    stored = draft.facts.checkpoint
    if draft.config.data.dataloader_type != "cyclic" or stored is None or stored.pass_size is None:
        return
    now = draft.config.training.micro_batch_size * draft.derived.data_parallel_size
    if now != stored.pass_size:
        yield Problem(
            f"--dataloader-type cyclic orders samples by micro-batch size * data-parallel size, which is {now} and was"
            f" {stored.pass_size} in the checkpoint",
            f"keep --micro-batch-size * data-parallel size at {stored.pass_size}, or use --dataloader-type single in a"
            " fresh run, whose order depends on neither",
        )


def _trained_on(datasets: Sequence[DatasetFacts]) -> list[DatasetFacts]:
    return [dataset for dataset in datasets if dataset.split in ("all", "train")]


def _splits(datasets: Sequence[DatasetFacts]) -> str:
    counts = Counter(dataset.split for dataset in datasets)
    return ", ".join(f"{count} for {split}" for split, count in counts.items())


def tokenizer_matches_checkpoint(draft: Draft) -> Iterator[Problem]:
    stored, now = draft.facts.checkpoint, draft.facts.tokenizer_fingerprint
    if stored and stored.tokenizer_fingerprint and now and stored.tokenizer_fingerprint != now:
        yield Problem(
            f"--tokenizer-model cannot change on resume, token numbers would mean other texts: the checkpoint has"
            f" fingerprint {stored.tokenizer_fingerprint}, this run {now}",
            "use the tokenizer of the first run, or start a fresh run without --load and with another --save",
        )


def schedules_match_checkpoint(draft: Draft) -> Iterator[Problem]:
    """As Megatron-LM asks: whoever changes a schedule half-way says so."""
    stored = draft.facts.checkpoint
    if stored is None or stored.schedule is None or not draft.continues_optimizer:
        return
    if draft.config.schedule.override_opt_param_scheduler:
        return
    changes = draft.derived.schedule.changes(stored.schedule)
    if changes:
        said = "; ".join(
            f"{name}: the checkpoint has {before}, this run {now}" for name, before, now in changes
        )
        yield Problem(
            f"the schedules are not those of the checkpoint: {said}",
            "add --override-opt-param-scheduler to go on with this run's, or --use-checkpoint-opt-param-scheduler to go"
            " on with the checkpoint's",
        )


def checkpoint_has_optimizer_state(draft: Draft) -> Iterator[Problem]:
    stored = draft.facts.checkpoint
    if stored is not None and not stored.has_optimizer and draft.continues_optimizer:
        yield Problem(
            f"{stored.path} was saved with --no-save-optim: it holds the weights alone",
            "add --finetune to begin a run with them, or --no-load-optim to go on without the optimizer's state",
        )


def restarts_keep_training_state(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    if checkpoint.save is None or checkpoint.save != checkpoint.load:
        return
    if checkpoint.finetune:
        yield Problem(
            "--finetune with --save and --load in one folder would begin at iteration 0 at every restart",
            "load from another folder, or leave out --finetune",
        )
    elif checkpoint.no_load_optim:
        yield Problem(
            "--no-load-optim with --save and --load in one folder would drop the optimizer's state at every restart",
            "load from another folder, or leave out --no-load-optim",
        )


def finetune_requires_load(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    if checkpoint.finetune and checkpoint.load is None:
        yield Problem("--finetune is given without --load", "add --load FOLDER, or leave --finetune out")


def changed_settings(draft: Draft) -> Iterator[str]:
    """What changed since the checkpoint, by class, such as `--lr 0.001 -> 0.002`. What is refused is a problem."""
    by_words: dict[str, list[str]] = {}
    for path, stored, now in _changes(draft):
        of = _class_of(draft, path)
        if of.kind == "silent" or (
            of is SCHEDULE and draft.config.schedule.use_checkpoint_opt_param_scheduler
        ):
            continue
        consent = _consent_to(draft, of) if of.kind == "consent" else ""
        words = f"with consent ({consent})" if consent else "safe"
        by_words.setdefault(words, []).append(f"{flag_of(path)} {_bare(stored)} -> {_shown(path, now)}")
    for words, changes in by_words.items():
        yield f"changed since the checkpoint, {words}: {', '.join(changes)}"


def _changes(draft: Draft) -> Iterator[tuple[str, Any, Any]]:
    """Path, stored value and value now. What the checkpoint does not know, an older version has written: no change."""
    stored = draft.facts.checkpoint.config if draft.facts.checkpoint else {}
    for setting in settings():
        now = draft.config.raw(setting.path)
        if setting.name not in stored.get(setting.section, {}) or not is_resolved(now):
            continue
        now = list(now) if isinstance(now, tuple) else now
        before = stored[setting.section][setting.name]
        if before != now:
            yield setting.path, before, now


def _class_of(draft: Draft, path: str) -> ResumeClass:
    is_learned = draft.config.model.position_embedding_type == "learned_absolute"
    if path == "model.max_position_embeddings" and is_learned:
        return SHAPE
    return classes_by_path()[path]


def _consent_to(draft: Draft, of: ResumeClass) -> str:
    """The flag by which the user consents to changes of this class; empty: there is none."""
    checkpoint, stored = draft.config.checkpoint, draft.facts.checkpoint
    if of is SCHEDULE and not draft.derived.schedule.changes((stored and stored.schedule) or {}):
        return ""  # said in other words, it means the same
    if of is SCHEDULE and draft.config.schedule.override_opt_param_scheduler:
        return of.consent
    if of in (SCHEDULE, OPTIMIZER_STATE) and not draft.continues_optimizer:
        return "--no-load-optim" if checkpoint.no_load_optim else "--skip-train"
    if of.consent == "--finetune" and stored is not None and stored.is_start:
        return "--finetune" if checkpoint.finetune else "--pretrained-checkpoint"
    return ""


def _shown(path: str, value: Any) -> str:
    is_counted = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{_bare(value)} {unit_of(path)}".rstrip() if is_counted else _bare(value)


def _bare(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _spelled(path: str, value: Any) -> str:
    """How to say this value on the command line."""
    flag = flag_of(path)
    if isinstance(value, bool):
        return flag if value else f"without {flag}"
    return f"without {flag}" if value is None or value == [] else f"{flag} {_bare(value)}"


def save_interval_has_a_folder(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    if checkpoint.save_interval is not None and checkpoint.save is None:
        yield Problem(
            f"--save-interval {checkpoint.save_interval} is given without --save",
            "add --save FOLDER, or leave --save-interval out",
        )


def missing_checkpoint_has_one_answer(draft: Draft) -> Iterator[Problem]:
    checkpoint = draft.config.checkpoint
    if checkpoint.load_or_start and checkpoint.exit_on_missing_checkpoint:
        yield Problem(
            "--load-or-start and --exit-on-missing-checkpoint contradict each other", "leave one of them out"
        )
    if checkpoint.load_or_start and checkpoint.load is None:
        yield Problem(
            "--load-or-start is given without --load", "add --load FOLDER, or leave --load-or-start out"
        )


RESUME_RULES: Final[tuple[Callable[[Draft], Iterator[Problem]], ...]] = (
    settings_match_checkpoint,
    data_matches_checkpoint,
    cyclic_pass_size_matches_checkpoint,
    tokenizer_matches_checkpoint,
    schedules_match_checkpoint,
    checkpoint_has_optimizer_state,
    restarts_keep_training_state,
    finetune_requires_load,
    save_interval_has_a_folder,
    missing_checkpoint_has_one_answer,
)
