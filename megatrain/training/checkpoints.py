"""State that a run restores from a checkpoint and stores in one, other than tensors and configuration; saving.py saves.

--load ─> load_checkpoint ─> model, optimizer, expert biases, loss scale, Progress ─> state_to_save ─> --save
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.checkpoint.adaptation import Adaptation
from megatrain.checkpoint.chunks import plan_chunks
from megatrain.checkpoint.find import RELEASE_NAME, find_checkpoints, is_of_megatron
from megatrain.checkpoint.load import Loaded, load_checkpoint, restore_expert_biases
from megatrain.checkpoint.save import SPACE_MARGIN
from megatrain.checkpoint.upcycling import Upcycling, upcycling_of
from megatrain.config import Plan, StoredRun, resolve
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.activation import GATED
from megatrain.config.plan import continues_optimizer
from megatrain.config.schema.training import CheckpointConfig
from megatrain.config.subjects.data_plans import evaluations
from megatrain.config.subjects.model_spec import activation_of
from megatrain.config.subjects.resume import adapted_settings
from megatrain.interop.megatron.checkpoint import padding_notes
from megatrain.optim.sharded import WEIGHT
from megatrain.storage.disk import Disk
from megatrain.training.distillation.teacher import RunTeacher
from megatrain.training.engine import Engine
from megatrain.training.launch.foreign_checkpoints import load_any
from megatrain.training.launch.ranks import Ranks

_MAX_NAMES = 10
"""Names of files that a note has."""


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, equal on all ranks. They count iterations whose report is read."""

    iteration: int = 0
    consumed_train_samples: int = 0
    scheduled_samples: int = 0
    """Samples of the steps that updated weights: the position of the schedules."""
    consumed_valid_samples: int = 0
    is_evaluation_pending: bool = False
    """The run stopped before the evaluation at this iteration was complete."""
    loaded: Path | None = None
    """The checkpoint from which the run continues: all its data are intact."""

    def advance(self, samples: int, *, is_updated: bool) -> None:
        """Count an iteration of this many samples; schedules move if it updated weights."""
        self.iteration += 1
        self.consumed_train_samples += samples
        self.scheduled_samples += samples if is_updated else 0


def require_space(ranks: Ranks, plan: Plan, engine: Engine) -> str | None:
    """Compare the free space at `--save` with the size of a checkpoint; return a note if a second one does not fit.

    Raises:
        ConfigError: on all ranks; not even one fits.
    """
    checkpoint = plan.config.checkpoint
    if checkpoint.save is None or plan.config.training.only_evaluates:
        return None
    plan_of_rank = plan_chunks(engine.optimizer, ranks.grid, saved_kinds(plan, engine))
    local_bytes = sum(chunk.num_bytes for chunk in plan_of_rank)
    of_ranks = ranks.grid.messages.gather(local_bytes)
    found = (sum(of_ranks), Disk().free_bytes(Path(checkpoint.save))) if ranks.is_main else None
    num_bytes, free = ranks.grid.messages.broadcast(found)
    text = f"a checkpoint has {num_bytes:,} bytes, and --save {checkpoint.save} has {free:,} bytes free"
    if free < num_bytes * SPACE_MARGIN:
        fix = "free some space, or give --save a folder on a larger disk"
        raise ConfigError(text, fix=fix, is_reported=not ranks.is_main)
    return f"> WARNING: {text}: a second one does not fit" if free < 2 * num_bytes * SPACE_MARGIN else None


def saved_kinds(plan: Plan, engine: Engine) -> tuple[str, ...]:
    """Return the kinds of state that the run saves."""
    return (WEIGHT,) if plan.config.checkpoint.no_save_optim else engine.optimizer.kinds


def resume_run(ranks: Ranks, engine: Engine, progress: Progress) -> Plan:
    """Load the checkpoint that the facts name, or draw the initial weights; update `progress`.

    Returns:
        The plan of the run: `ranks.plan`, or a new one where the loaded checkpoint is older than the planned one.
    """
    stored, config, say = ranks.facts.checkpoint, ranks.plan.config, ranks.console.print
    if stored is None:
        if config.checkpoint.load is not None:
            say(f"> {config.checkpoint.load} holds no checkpoint yet: starting from scratch")
        with ranks.phases.phase("drawing initial weights"):
            engine.initialize()
        return ranks.plan
    with_optimizer = continues_optimizer(config, ranks.facts)
    with ranks.phases.phase("loading the checkpoint"):
        loaded = _load(ranks, engine, stored, with_optimizer=with_optimizer)
    biases = loaded.state.get("expert_biases", {})  # absent in old checkpoints
    if stored.is_start:
        biases = {
            name: values for name, values in biases.items() if name in engine.model.expert_biases.state()
        }
    if biases or not stored.is_start:
        restore_expert_biases(engine.model, biases, loaded.path)
    for line in (*loaded.skipped, *_notes(loaded, ranks.plan)):
        say(f"> {line}")
    is_planned = str(loaded.path) == stored.path
    is_start = stored.is_start or loaded.path.name == RELEASE_NAME
    plan = ranks.plan if is_planned else _plan_again(ranks, loaded, stored, is_start=is_start)
    if is_start:
        say(f"> loaded the weights of {loaded.path}, iteration {loaded.iteration}; the run starts with them")
        return plan
    _restore_progress(progress, loaded)
    if config.training.eval_only and not loaded.state["is_evaluation_left"]:  # the last evaluation, again
        progress.consumed_valid_samples = max(0, progress.consumed_valid_samples - evaluations(plan).samples)
    if with_optimizer:
        _restore_optimizer(engine, progress, loaded)
    _restore_amax_history(engine, loaded)
    say(
        f"> loaded {loaded.path}: iteration {progress.iteration}, {progress.consumed_train_samples} samples consumed"
    )
    return plan


def load_teacher(ranks: Ranks, engine: Engine) -> str | None:
    """Load the weights of the run's teacher, if it has one; return a line for the log. All ranks call it."""
    distillation, config = engine.model.distillation, ranks.plan.config
    if distillation is None or not isinstance(distillation.teacher, RunTeacher):
        return None
    with ranks.phases.phase("loading the teacher"):
        loaded = distillation.teacher.load(
            vocab_size=ranks.plan.derived.vocab_size, allows_format_torch=config.checkpoint.allow_pickle
        )
    return f"> teacher: loaded the weights of {loaded.path}, iteration {loaded.iteration}"


def local_folder(checkpoint: CheckpointConfig) -> Path | None:
    """Return the folder of local checkpoints, on a disk of each node; None: there are none."""
    folder, kind = checkpoint.non_persistent_folder, checkpoint.non_persistent_ckpt_type
    return Path(folder) if folder is not None and kind == "local" else None


def rewind_run(
    ranks: Ranks, engine: Engine, progress: Progress, folder: Path, *, at_most: int
) -> Path | None:
    """Load the newest intact checkpoint of `folder` up to iteration `at_most`; return None if there is none. All ranks call it."""
    paths = None
    if ranks.is_main:
        first = ranks.plan.derived.train_start // ranks.plan.config.training.global_batch_size  # of the data
        found = [one for one in find_checkpoints(folder) if first <= one.iteration <= at_most]
        paths = [str(one.path) for one in found if one.problem is None]
    paths = ranks.grid.messages.broadcast(paths)
    if not paths:
        return None
    with ranks.phases.heartbeat("loading the checkpoint"):
        loaded = load_checkpoint(Path(paths[0]), engine.optimizer, ranks.grid)
    restore_expert_biases(engine.model, loaded.state.get("expert_biases", {}), loaded.path)
    engine.forget_steps()
    _restore_progress(progress, loaded)
    _restore_optimizer(engine, progress, loaded)
    _restore_amax_history(engine, loaded)
    return loaded.path


def _restore_amax_history(engine: Engine, loaded: Loaded) -> None:
    """Restore the history from which delayed FP8 scales follow, with which evaluations compute too."""
    if engine.model.fp8 is not None:
        engine.model.fp8.history.restore(loaded.state.get("amax_history", {}))
        engine.data_parallel.all_gather_all_weights()  # --fp8-param-gather casts with these scales


def _restore_optimizer(engine: Engine, progress: Progress, loaded: Loaded) -> None:
    """Restore what belongs to the optimizer's state: the position of the schedules, and the loss scale."""
    progress.scheduled_samples = loaded.state.get("scheduled_samples", loaded.consumed_train_samples)
    engine.loss_scaler.restore(loaded.state.get("loss_scale", {}))


def _restore_progress(progress: Progress, loaded: Loaded) -> None:
    progress.iteration, progress.loaded = loaded.iteration, loaded.path
    progress.consumed_train_samples = loaded.consumed_train_samples
    progress.consumed_valid_samples = loaded.state["consumed_valid_samples"]
    progress.is_evaluation_pending = loaded.state["is_evaluation_left"]


def _load(ranks: Ranks, engine: Engine, stored: StoredRun, *, with_optimizer: bool) -> Loaded:
    """Load the weights, and the state of the optimizer, of the checkpoint or the folder that the facts name."""
    others = [Path(source) for source in stored.sources[1:]]
    local = local_folder(ranks.plan.config.checkpoint)
    return load_any(
        stored.sources[0],
        engine.optimizer,
        ranks.grid,
        vocab_size=ranks.plan.derived.vocab_size,
        allows_format_torch=ranks.plan.config.checkpoint.allow_pickle,
        adaptation=_adaptation(ranks.plan, stored) if stored.is_start else None,
        with_optimizer=with_optimizer,
        also=others,
        local=local if local in others else None,
    )


def _notes(loaded: Loaded, plan: Plan) -> Iterator[str]:
    """Yield what the user should know of files that came from other nodes, and of a checkpoint of Megatron-LM."""
    if loaded.copied:
        names, more = ", ".join(loaded.copied[:_MAX_NAMES]), len(loaded.copied) - _MAX_NAMES
        names += f" and {more} more" if more > 0 else ""
        yield f"{loaded.path}: copied from other nodes, since a node lacked them or had them damaged: {names}"
    if is_of_megatron(loaded.path):
        padded = loaded.config["model"]["padded_vocab_size"]
        for note in padding_notes(padded, plan.derived.vocab_size):
            yield f"{note}; for equal losses keep them with --vocab-size {padded}"


def _adaptation(plan: Plan, stored: StoredRun) -> Adaptation:
    """Return how the model of the run differs from the one whose weights it starts with."""
    changed = adapted_settings(plan.config, stored.config)
    return Adaptation(
        upcycling=_upcycling(plan) if stored.is_upcycled else None,
        unties_head="model.untie_embeddings_and_output_weights" in changed,
        adds_biases=not changed.isdisjoint({"model.disable_bias_linear", "model.add_qkv_bias"}),
        drops_mtp="model.mtp_num_layers" in changed,
        max_tokens=stored.config["model"]["padded_vocab_size"],
        seed=plan.config.training.seed,
    )


def _upcycling(plan: Plan) -> Upcycling:
    is_cubic = activation_of(plan.config.model)[0] in (*GATED, "squared_relu")
    return upcycling_of(plan.config.experts, has_cubic_mlp=is_cubic, seed=plan.config.training.seed)


def _plan_again(ranks: Ranks, loaded: Loaded, planned: StoredRun, *, is_start: bool) -> Plan:
    """Return the plan for the loaded checkpoint: the newer one, for which `ranks.plan` was made, is damaged."""
    used = StoredRun.of(
        loaded,
        path=str(loaded.path),
        sources=planned.sources,
        settings=planned.settings,
        is_of_megatron=is_of_megatron(loaded.path),
        is_upcycled=planned.is_upcycled,
        started=planned.started,
    )
    used = used.weights_only if is_start else used
    plan = resolve(ranks.request, dataclasses.replace(ranks.facts, checkpoint=used))
    for name, words in {
        "train_plan": "training samples planned",
        "later_phases": "later phases of training",
        "valid_plan": "validation samples planned",
        "test_plan": "test samples planned",
    }.items():
        before, now = getattr(ranks.plan.derived, name), getattr(plan.derived, name)
        if before != now:
            ranks.console.print(f"> {words} with this checkpoint: {' '.join(map(str, now))}")
    return plan


def _amax_history(ranks: Ranks, engine: Engine) -> dict[str, Any]:
    """Return the history of delayed FP8 scales of all stages on rank 0, and an empty one on others."""
    if engine.model.fp8 is None:
        return {}
    of_ranks = ranks.grid.messages.gather(engine.model.fp8.history.state())
    return {name: entries for state in of_ranks for name, entries in state.items()}


def state_to_save(ranks: Ranks, plan: Plan, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Return the state that a checkpoint's manifest stores. The keys are part of the checkpoint format."""
    config, derived = plan.config, plan.derived
    return {
        "consumed_valid_samples": progress.consumed_valid_samples,
        "scheduled_samples": progress.scheduled_samples,
        "schedule": derived.schedule.to_dict(),
        "loss_scale": engine.loss_scaler.state(),
        "expert_biases": engine.model.expert_biases.state(),
        "amax_history": _amax_history(ranks, engine),
        "has_optimizer": not config.checkpoint.no_save_optim,
        "is_evaluation_left": progress.is_evaluation_pending,
        "tokenizer_fingerprint": ranks.facts.tokenizer_fingerprint,
        "data_plans": {
            "train": derived.train_plan,
            "valid": derived.valid_plan,
            "test": derived.test_plan,
            "phases": [vars(phase) for phase in derived.later_phases],
            "start": derived.train_start,
        },
        "pass_size": config.training.micro_batch_size * ranks.grid.dp.size,
        "datasets": [vars(dataset) for dataset in ranks.facts.datasets],
    }
