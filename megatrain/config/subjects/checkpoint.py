"""Checkpoints: which are kept, non-persistent ones, and the start from one."""

from __future__ import annotations

from pathlib import PurePath

from megatrain.config.errors import Problem
from megatrain.config.plan import Draft
from megatrain.config.registry import Notes, Problems, note, rule
from megatrain.config.schema.training import HF_PREFIX
from megatrain.config.schema.tree import flag_of


@rule
def non_persistent_checkpoints_have_a_folder(draft: Draft) -> Problems:
    checkpoint = draft.config.checkpoint
    interval, kind = checkpoint.non_persistent_save_interval, checkpoint.non_persistent_ckpt_type
    if interval is not None and kind is None:
        yield Problem(
            f"--non-persistent-save-interval {interval} is given without --non-persistent-ckpt-type",
            "add --non-persistent-ckpt-type global, or local with --non-persistent-local-ckpt-dir",
        )
    elif kind == "local" and checkpoint.non_persistent_local_ckpt_dir is None:
        yield Problem(
            "--non-persistent-ckpt-type local needs a folder",
            "add --non-persistent-local-ckpt-dir with a folder on a fast disk of the node",
        )


@rule
def groups_of_copies_fit_the_ranks(draft: Draft) -> Problems:
    checkpoint, world = draft.config.checkpoint, draft.derived.world_size
    if not checkpoint.replication or checkpoint.non_persistent_ckpt_type != "local":
        return
    jump, factor = checkpoint.replication_jump, checkpoint.replication_factor
    per_node = draft.facts.ranks_per_node
    if jump is None:
        yield Problem(
            "--replication is given without --replication-jump",
            f"add --replication-jump {per_node or 'with the number of ranks per node'}",
        )
    elif per_node and jump % per_node:
        yield Problem(
            f"--replication-jump {jump} with {per_node} ranks per node: copies would be on the node of the file itself",
            f"use --replication-jump {per_node}",
        )
    elif world % (jump * factor):
        yield Problem(
            f"{world} ranks do not divide into groups of --replication-factor {factor} nodes with --replication-jump {jump}",
            f"choose a --replication-factor that divides {world // jump or 1} nodes, or remove --replication",
        )


@note("result")
def stop_without_saving(draft: Draft) -> Notes:
    resilience, iters = draft.config.resilience, draft.derived.train_iters
    stops = {
        "--exit-interval": 0 < (resilience.exit_interval or 0) < iters,
        "--exit-duration-in-mins": resilience.exit_duration_in_mins,
        "--phase-transition-iterations": draft.config.data.phase_transition_iterations,
    }
    flags = ", ".join(flag for flag, is_given in stops.items() if is_given)
    if draft.config.checkpoint.save is None and flags:
        yield f"a stop by {flags} leaves no checkpoint, since --save is not given"


@note("result")
def first_start_is_over(draft: Draft) -> Notes:
    stored = draft.facts.checkpoint
    if stored is not None and stored.started:
        flags = " and ".join(flag_of(name) for name in stored.started)
        yield (
            f"{flags} applied to the first start: this run has written {stored.path} since then, and resumes it"
            " completely; another start needs another --save folder"
        )


@note("result")
def finetuning_replaces_checkpoints(draft: Draft) -> Notes:
    checkpoint, stored = draft.config.checkpoint, draft.facts.checkpoint
    is_first = stored is not None and "finetune" not in stored.started
    if checkpoint.finetune and is_first and checkpoint.save == checkpoint.load:
        yield (
            f"--finetune starts at iteration 0 in the folder of its start, {checkpoint.save}: a save replaces the checkpoint of the"
            " same iteration, and restarts resume this run; another --save folder keeps the old ones"
        )


@note("result")
def finetune_does_not_resume(draft: Draft) -> Notes:
    checkpoint = draft.config.checkpoint
    if checkpoint.finetune and checkpoint.save not in (None, checkpoint.load):
        start = f"--pretrained-checkpoint {checkpoint.load} " if checkpoint.load else ""
        yield (
            "the same command with --finetune does not resume after an early exit; to resume, use"
            f" {start}--load {checkpoint.save} --save {checkpoint.save}"
        )


@note("result")
def checkpoint_is_of_megatron(draft: Draft) -> Notes:
    stored, checkpoint = draft.facts.checkpoint, draft.config.checkpoint
    if stored is None or not stored.is_of_megatron:
        return
    yield f"{stored.path} is a checkpoint of Megatron-LM; states of random generators and loss scales are not read"
    if checkpoint.save is not None and PurePath(checkpoint.save) in PurePath(stored.path).parents:
        yield (
            f"--save {checkpoint.save} has checkpoints of Megatron-LM: they stay, those of this run are added in megatrain's"
            " format, and a restart loads the newest of all; Megatron-LM cannot resume there any more, since"
            " latest_checkpointed_iteration.txt names a checkpoint of this run"
        )


@rule
def checkpoint_has_optimizer_state(draft: Draft) -> Problems:
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


@rule
def vocabulary_is_in_the_folder(draft: Draft) -> Problems:
    """Weights of transformers may have more rows than the tokenizer has tokens, and never fewer."""
    stored, size = draft.facts.checkpoint, draft.derived.vocab_size
    if stored is None or not stored.path.startswith(HF_PREFIX):
        return
    rows = stored.config["model"]["padded_vocab_size"]
    if size > rows:
        yield Problem(
            f"{stored.path}: its vocabulary has {rows} rows, and the tokenizer {size} tokens",
            f"add rows with resize_token_embeddings({size}) of transformers and name the folder that it saves, or use a tokenizer of"
            f" at most {rows} tokens",
        )
