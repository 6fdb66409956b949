"""The list of all notes: settings without effect, rounded values, differences from Megatron-LM, changes since a checkpoint."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Final

from megatrain.config.derive.attention_features import layers_with_softcap_or_dropout
from megatrain.config.derive.batch_sizes import micro_batches
from megatrain.config.derive.context_parallel import ring_is_replaced
from megatrain.config.derive.cuda_graphs import cuda_graphs_have_no_effect
from megatrain.config.derive.custom_layers import differences, layer_function, values_of
from megatrain.config.derive.fp8 import fp8_recipes
from megatrain.config.derive.model_spec import spec_of_flags
from megatrain.config.derive.transformer_engine import local_fp8_layers, local_leaves
from megatrain.config.plan import Draft
from megatrain.config.rules.logging import missing_packages
from megatrain.config.rules.resume import changed_settings
from megatrain.config.rules.unproven import unproven
from megatrain.config.rules.without_effect import (
    block_size_without_effect,
    modules_without_effect,
    param_gather_without_effect,
    settings_without_effect,
)
from megatrain.config.schema.tree import flag_of


def norms_are_recomputed(draft: Draft) -> Iterator[str]:
    if draft.config.training.recompute_norms and not draft.is_given("training.recompute_norms"):
        reason = draft.origins["training.recompute_norms"].detail
        yield f"norms are recomputed: {reason} (disable with --no-recompute-norms)"


def dropout_by_default(draft: Draft) -> Iterator[str]:
    paths = ("model.hidden_dropout", "model.attention_dropout")
    enabled = [path for path in paths if draft.is_default(path) and draft.config.get(path) > 0]
    if enabled:
        flags = " and ".join(f"{flag_of(path)} {draft.config.get(path)}" for path in enabled)
        yield f"{flags} by default, as in Megatron-LM; most models are trained with 0 today"


def float32_by_default(draft: Draft) -> Iterator[str]:
    is_float32 = draft.config.precision.params_dtype == "float32"
    if is_float32 and draft.config.training.device == "cuda" and not draft.is_given("precision.params_dtype"):
        yield "--params-dtype float32 by default, as in Megatron-LM; --bf16 is several times faster on a GPU"


def expert_gemms_are_not_grouped(draft: Draft) -> Iterator[str]:
    """The grouped GEMM (`kernels/moe/grouped_gemm.py`) has limits on dtype and widths."""
    if draft.config.training.device != "cuda":
        return
    widths = {
        layer.experts.ffn_hidden_size // draft.derived.expert_tensor_parallel_size
        for layer in draft.derived.model_spec.layers
        if layer.experts is not None
    }
    dtype, widths = (
        draft.config.precision.params_dtype,
        {*widths, draft.config.model.hidden_size} if widths else widths,
    )
    if widths and (dtype != "bfloat16" or any(width % 8 for width in widths)):
        reason = f"in {dtype}" if dtype != "bfloat16" else "with widths that are not multiples of 8"
        yield (
            f"experts are computed one by one {reason}, which is slow since the host waits for the tokens per expert in"
            " every layer; the grouped GEMM requires --bf16 and widths that are multiples of 8"
        )


def strategy_without_fsdp(draft: Draft) -> Iterator[str]:
    path = "parallel.data_parallel_sharding_strategy"
    if draft.is_given(path) and not draft.config.parallel.use_megatron_fsdp:
        yield f"{flag_of(path)} {draft.config.get(path)} has an effect even without --use-megatron-fsdp, unlike in Megatron-LM"


def train_samples_are_rounded(draft: Draft) -> Iterator[str]:
    samples, read = draft.config.training.train_samples, draft.derived.train_samples
    if samples is not None and samples > read:
        yield f"the last {samples - read} of --train-samples {samples} are not read, since they do not fill a global batch"
    if samples is not None and samples < read:
        yield f"training ends at {read} samples, not {samples}, since the last global batch is completed"


def batch_is_decreased(draft: Draft) -> Iterator[str]:
    training, passes = draft.config.training, draft.derived.num_microbatches
    size = passes * training.micro_batch_size * draft.derived.data_parallel_size
    if training.decrease_batch_size_if_needed and size != training.global_batch_size:
        yield f"--global-batch-size {training.global_batch_size} is decreased to {size}, {micro_batches(passes)} per replica"


def schedules_restart(draft: Draft) -> Iterator[str]:
    stored, checkpoint = draft.facts.checkpoint, draft.config.checkpoint
    is_continued = stored is not None and not stored.is_start
    if is_continued and checkpoint.no_load_optim and not draft.continues_optimizer:
        yield "--no-load-optim: the learning-rate and weight-decay schedules start from scratch, as in Megatron-LM"


def schedules_are_the_checkpoints(draft: Draft) -> Iterator[str]:
    stored = draft.facts.checkpoint.schedule if draft.facts.checkpoint else None
    if stored and draft.continues_optimizer and draft.config.schedule.use_checkpoint_opt_param_scheduler:
        given = {"--lr": draft.config.optimizer.lr, "--min-lr": draft.config.schedule.min_lr}
        used = {"--lr": draft.derived.schedule.lr, "--min-lr": draft.derived.schedule.min_lr}
        changes = [f"{flag} {used[flag]}, not {given[flag]}" for flag in given if used[flag] != given[flag]]
        yield "schedules are taken from the checkpoint" + (f" ({'; '.join(changes)})" if changes else "")


def batch_changed_on_resume(draft: Draft) -> Iterator[str]:
    stored = draft.facts.checkpoint
    before = stored.config.get("training", {}).get("global_batch_size") if stored else None
    now = draft.config.training.global_batch_size
    if stored is not None and stored.iteration and before not in (None, now):
        yield (
            f"--global-batch-size {before} -> {now}: the order of samples is unchanged, and training resumes after sample"
            f" {stored.consumed_train_samples}; settings counted in iterations now cover a different number of samples"
        )


def run_ends_before_the_decay(draft: Draft) -> Iterator[str]:
    derived, schedule = draft.derived, draft.derived.schedule
    batch, is_trained = draft.config.training.global_batch_size, not draft.config.training.only_evaluates
    restarts = draft.facts.checkpoint is not None and not draft.continues_optimizer
    end = derived.train_samples - (derived.start_consumed_samples if restarts else 0)
    if is_trained and schedule.style.decays and schedule.lr_decay_samples - end >= batch:
        yield (
            f"the run ends at sample {end}, before the decay of the learning rate to --min-lr {schedule.min_lr:g} ends at"
            f" sample {schedule.lr_decay_samples}"
        )


def last_iterations_have_no_learning_rate(draft: Draft) -> Iterator[str]:
    derived, schedule = draft.derived, draft.derived.schedule
    batch, is_trained = draft.config.training.global_batch_size, not draft.config.training.only_evaluates
    restarts = draft.facts.checkpoint is not None and not draft.continues_optimizer
    end = derived.train_samples - (derived.start_consumed_samples if restarts else 0)
    past = (end - schedule.lr_decay_samples - (not schedule.style.reaches_min_lr)) // batch
    if is_trained and schedule.style.decays and past > 0 and schedule.min_lr == 0:
        which = f"the last {past} iterations have" if past > 1 else "the last iteration has"
        yield (
            f"{which} a learning rate of 0, since the decay ends at sample {schedule.lr_decay_samples} of {end}"
            " (--lr-decay-iters, --lr-decay-samples) and --min-lr is 0: no weight changes then"
        )


def split_has_no_effect(draft: Draft) -> Iterator[str]:
    is_separate = any(dataset.split != "all" for dataset in draft.facts.datasets)
    if is_separate and draft.is_given("data.split"):
        yield f"--split {draft.config.data.split} has no effect, since each split has its own data"


def end_of_document_was_guessed(draft: Draft) -> Iterator[str]:
    data = draft.config.data
    if draft.facts.tokenizer_note and (
        data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    ):
        yield draft.facts.tokenizer_note


def loss_masks_are_not_read(draft: Draft) -> Iterator[str]:
    masked = [one.prefix for one in draft.facts.datasets if one.has_loss_mask]
    if masked and not draft.config.data.sft:
        yield (
            f"{', '.join(dict.fromkeys(masked))}: conversations with a loss mask next to them, which is not read without"
            " --sft: prompts have loss, too"
        )


def datasets_are_duplicated(draft: Draft) -> Iterator[str]:
    keys = [(one.from_iteration, one.split, one.digest) for one in draft.facts.datasets]
    counts = Counter(keys)
    duplicates = {one.prefix for one, key in zip(draft.facts.datasets, keys, strict=True) if counts[key] > 1}
    if duplicates:
        yield f"{', '.join(sorted(duplicates))}: the same data is given more than once, and its samples are repeated"


def phases_are_not_reached(draft: Draft) -> Iterator[str]:
    unread = [str(phase.from_iteration) for phase in draft.derived.later_phases if not phase.plan]
    if unread and not draft.config.training.only_evaluates:
        yield (
            f"--data-schedule: the run ends at iteration {draft.derived.train_iters}, before the data changes at"
            f" {', '.join(unread)}"
        )
    end = draft.derived.train_iters
    late = [str(one) for one in draft.derived.phase_transitions if one >= end]
    if late:
        yield f"--phase-transition-iterations {' '.join(late)}: no effect, since the run ends at iteration {end}"


def attention_kernel(draft: Draft) -> Iterator[str]:
    is_given = not draft.is_default("model.attention_backend")
    if draft.config.training.device == "cuda" or is_given or layers_with_softcap_or_dropout(draft) != "none":
        yield draft.origins["derived.attention_backend"].detail


def packages_of_the_run_are_missing(draft: Draft) -> Iterator[str]:
    if draft.config.training.dry_run is not None:
        yield from (f"{problem.text} on this host" for problem in missing_packages(draft))


def memory_is_planned_with_local(draft: Draft) -> Iterator[str]:
    if draft.config.training.dry_run and draft.derived.transformer_impl != "local":
        yield (
            "the memory plan assumes --transformer-impl local, since the activations that Transformer Engine saves are"
            " unknown without a GPU"
        )


def layers_of_local(draft: Draft) -> Iterator[str]:
    """Name the leaves of `local` under --transformer-impl transformer_engine."""
    if draft.config.model.transformer_impl == "local":
        return
    if draft.derived.transformer_impl == "local":
        yield draft.origins["derived.transformer_impl"].detail
    leaves = [f"{leaf} ({reason})" for leaf, reason in local_leaves(draft).items()]
    if leaves:
        yield f"--transformer-impl transformer_engine: local supplies {', '.join(leaves)}"


def fp8_layers_of_transformer_engine(draft: Draft) -> Iterator[str]:
    """Name the implementation of each linear layer in FP8."""
    precision, numbers = draft.config.precision, draft.derived.fp8_layers
    if draft.derived.transformer_impl == "local" or not numbers:
        return
    reason = local_fp8_layers(draft)
    chosen = "" if draft.derived.fp8_modules is None else " and --te-precision-config-file"
    yield (
        f"--fp8-format {precision.fp8_format} --fp8-recipe {precision.fp8_recipe}{chosen}: Transformer Engine computes the linear"
        f" layers of layers {_ranges(numbers)} in FP8"
        + (f", but local those after norms ({reason})" if reason else "")
        + f"; weights are all-gathered in {precision.params_dtype}"
    )


def gradients_of_blocks_are_e4m3(draft: Draft) -> Iterator[str]:
    if ("blockwise", "hybrid") in fp8_recipes(draft) and draft.derived.transformer_impl == "local":
        yield "--fp8-format hybrid with --fp8-recipe blockwise: gradients are in E4M3 too, the only format whose blocks GPUs multiply"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as 1-30, 32."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def custom_layers_are_used(draft: Draft) -> Iterator[str]:
    function, digest = layer_function(draft.config.model.spec), draft.config.model.spec_digest
    if function is not None:
        own, of_flags = (values_of(spec.layers) for spec in (draft.derived.model_spec, spec_of_flags(draft)))
        found = differences(own, of_flags, "by the flags")
        differences_text = "; ".join(found) or "the same as the flags describe"
        yield f"--spec {function} (digest {digest}) defines the layers: {differences_text}"


def mup_base_is_this_model(draft: Draft) -> Iterator[str]:
    model = draft.config.model
    if model.use_mup and draft.origins["model.mup_base_hidden_size"].kind == "derived":
        yield (
            f"--use-mup without --mup-base-hidden-size uses --hidden-size {model.hidden_size} as base, as in Megatron-LM: only"
            " attention scores are scaled"
        )


def mup_output_layer_lr_differs(draft: Draft) -> Iterator[str]:
    model, optimizer = draft.config.model, draft.config.optimizer
    if not (model.use_mup and model.mup_width_mult != 1 and model.untie_embeddings_and_output_weights):
        return
    if optimizer.decoupled_lr is None:
        m, is_sgd = model.mup_width_mult, optimizer.optimizer == "sgd"
        megatron_lr, mup_lr = ("lr", f"lr * {m:g}") if is_sgd else (f"lr / {m:g}", "lr")
        yield (
            f"--use-mup: the learning rate of an untied output layer is {megatron_lr}, as in Megatron-LM; muP"
            f" (arXiv:2203.03466, table 8) has {mup_lr}, set by --decoupled-lr {optimizer.lr * (m if is_sgd else 1):g}"
        )


def profiling_ends_in_time(draft: Draft) -> Iterator[str]:
    logging, train_iters = draft.config.logging, draft.derived.train_iters
    if not logging.profile or train_iters is None:
        return
    if logging.profile_step_start >= train_iters:
        yield (
            f"--profile-step-start {logging.profile_step_start} has no effect, since the run ends at iteration {train_iters}"
        )
    elif logging.profile_step_end > train_iters:
        yield f"--profile-step-end {logging.profile_step_end}: the profile ends with the run at iteration {train_iters}"


def no_weights_are_gathered(draft: Draft) -> Iterator[str]:
    path = "parallel.overlap_param_gather"
    is_whole = draft.config.parallel.data_parallel_sharding_strategy == "no_shard"
    if draft.is_given(path) and draft.config.get(path) and is_whole:
        yield (
            "--overlap-param-gather has no effect without --use-distributed-optimizer, since every rank updates all of its"
            " weights"
        )


def stop_without_saving(draft: Draft) -> Iterator[str]:
    resilience = draft.config.resilience
    if draft.config.checkpoint.save is None and (
        resilience.exit_interval
        or resilience.exit_duration_in_mins
        or draft.config.data.phase_transition_iterations
    ):
        yield "the run exits early without a checkpoint, since --save is not given"


def first_start_is_over(draft: Draft) -> Iterator[str]:
    stored = draft.facts.checkpoint
    if stored is not None and stored.started:
        flags = " and ".join(flag_of(name) for name in stored.started)
        yield (
            f"{flags} applied to the first start: this run has written {stored.path} since then, and resumes it"
            " completely; another start needs another --save folder"
        )


def finetuning_replaces_checkpoints(draft: Draft) -> Iterator[str]:
    checkpoint, stored = draft.config.checkpoint, draft.facts.checkpoint
    is_first = stored is not None and "finetune" not in stored.started
    if checkpoint.finetune and is_first and checkpoint.save == checkpoint.load:
        yield (
            f"--finetune starts at iteration 0 in the folder of its start, {checkpoint.save}: a save replaces the checkpoint of the"
            " same iteration, and restarts resume this run; another --save folder keeps the old ones"
        )


def finetune_does_not_resume(draft: Draft) -> Iterator[str]:
    checkpoint = draft.config.checkpoint
    if checkpoint.finetune and checkpoint.save not in (None, checkpoint.load):
        yield (
            "the same command with --finetune does not resume after an early exit; to resume, use"
            f" --pretrained-checkpoint {checkpoint.load} --load {checkpoint.save} --save {checkpoint.save}"
        )


def checkpoint_is_of_megatron(draft: Draft) -> Iterator[str]:
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


def changed_since_the_checkpoint(draft: Draft) -> Iterator[str]:
    yield from changed_settings(draft)


NOTES: Final[tuple[Callable[[Draft], Iterator[str]], ...]] = (
    unproven,
    settings_without_effect,
    block_size_without_effect,
    modules_without_effect,
    param_gather_without_effect,
    dropout_by_default,
    float32_by_default,
    ring_is_replaced,
    cuda_graphs_have_no_effect,
    expert_gemms_are_not_grouped,
    strategy_without_fsdp,
    norms_are_recomputed,
    train_samples_are_rounded,
    batch_is_decreased,
    schedules_restart,
    schedules_are_the_checkpoints,
    batch_changed_on_resume,
    run_ends_before_the_decay,
    last_iterations_have_no_learning_rate,
    split_has_no_effect,
    datasets_are_duplicated,
    loss_masks_are_not_read,
    phases_are_not_reached,
    end_of_document_was_guessed,
    attention_kernel,
    packages_of_the_run_are_missing,
    memory_is_planned_with_local,
    layers_of_local,
    fp8_layers_of_transformer_engine,
    gradients_of_blocks_are_e4m3,
    custom_layers_are_used,
    mup_base_is_this_model,
    mup_output_layer_lr_differs,
    stop_without_saving,
    profiling_ends_in_time,
    first_start_is_over,
    finetuning_replaces_checkpoints,
    finetune_does_not_resume,
    checkpoint_is_of_megatron,
    changed_since_the_checkpoint,
    no_weights_are_gathered,
)
