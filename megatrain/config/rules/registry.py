"""What must hold between settings, and between settings and facts: one small function a rule.

A rule yields problems, each with the flag, its value and a value that works. It may compute freely: where something
that it needs is wrong already, `resolve` skips it. Rules about sizes are in `size_rules.py`, about the model's parts in
`model_rules.py`, about --deterministic-mode in `determinism.py`, about batches and schedules in
`training_rules.py`, about a checkpoint in `resume.py`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.errors import Problem
from megatrain.config.features.table import features_are_proven
from megatrain.config.plan import Draft
from megatrain.config.rules.data import DATA_RULES
from megatrain.config.rules.determinism import DETERMINISM_RULES
from megatrain.config.rules.experts import EXPERT_RULES
from megatrain.config.rules.layers import LAYER_RULES
from megatrain.config.rules.logging import LOG_RULES
from megatrain.config.rules.model import MODEL_RULES
from megatrain.config.rules.parallel import PARALLEL_RULES
from megatrain.config.rules.resume import RESUME_RULES
from megatrain.config.rules.sizes import SIZE_RULES
from megatrain.config.rules.training import TRAINING_RULES
from megatrain.config.rules.transformer_engine import TRANSFORMER_ENGINE_RULES
from megatrain.config.schema.tokenizer import TokenizerConfig, missing_end_of_document, tokenizer_problems

Problems = Iterator[Problem]


def training_has_one_length(draft: Draft) -> Problems:
    training = draft.config.training
    if training.train_iters is None and training.train_samples is None:
        yield Problem(
            "neither --train-iters nor --train-samples is given",
            "say how long to train, such as --train-iters 1000",
        )
    if training.train_iters is not None and training.train_samples is not None:
        yield Problem(
            f"--train-iters {training.train_iters} and --train-samples {training.train_samples} both say how long to train",
            "give one of them",
        )


def kernels_can_be_compiled(draft: Draft) -> Problems:
    """Plans of other machines do without the compiler."""
    training = draft.config.training
    if (
        draft.derived.device == "cuda"
        and training.compile
        and not (draft.facts.has_triton or training.dry_run)
    ):
        yield Problem(
            "Triton, which compiles the kernels of a run on GPUs, is not installed",
            "install the triton that this torch names as its requirement, or use --no-compile, which is slower",
        )


def samples_fill_a_batch(draft: Draft) -> Problems:
    training = draft.config.training
    samples, batch = training.train_samples, training.global_batch_size
    is_growing = bool(training.rampup_batch_size) or training.step_batch_size_schedule is not None
    if samples is not None and draft.derived.train_iters == 0:
        yield Problem(
            f"--train-samples {samples} do not fill one {'batch' if is_growing else f'--global-batch-size {batch}'}",
            f"use --train-samples {batch} or more",
        )


def warmup_has_one_length(draft: Draft) -> Problems:
    schedule = draft.config.schedule
    given = {
        "--lr-warmup-fraction": schedule.lr_warmup_fraction,
        "--lr-warmup-iters": schedule.lr_warmup_iters or None,
        "--lr-warmup-samples": schedule.lr_warmup_samples or None,
    }
    said = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if len(said) > 1:
        yield Problem(f"{' and '.join(said)} all say how long warm-up takes", "give one of them")


def decay_has_one_length(draft: Draft) -> Problems:
    iterations, samples = draft.config.schedule.lr_decay_iters, draft.config.schedule.lr_decay_samples
    if iterations is not None and samples is not None:
        yield Problem(
            f"--lr-decay-iters {iterations} and --lr-decay-samples {samples} both say when the decay ends",
            "give one of them",
        )


def warmup_ends_before_decay(draft: Draft) -> Problems:
    warmup, decay = draft.derived.lr_warmup_samples, draft.derived.lr_decay_samples
    if warmup >= decay:
        yield Problem(
            f"warm-up takes {warmup} samples, and the decay ends at {decay}",
            "shorten warm-up (--lr-warmup-iters, --lr-warmup-samples, --lr-warmup-fraction), or end the decay later"
            " (--lr-decay-iters, --lr-decay-samples)",
        )


def learning_rates_are_in_order(draft: Draft) -> Problems:
    schedule, top = draft.config.schedule, draft.config.optimizer.lr
    for flag, value in (("--min-lr", schedule.min_lr), ("--lr-warmup-init", schedule.lr_warmup_init)):
        if value > top:
            yield Problem(f"{flag} {value} is above --lr {top}", f"use {flag} {top} or less")


def vocabulary_is_known(draft: Draft) -> Problems:
    tokenizer, facts = draft.config.tokenizer, draft.facts
    is_size_alone = tokenizer == TokenizerConfig(vocab_size=tokenizer.vocab_size)
    if is_size_alone and tokenizer.vocab_size is not None and draft.config.data.mock_data:
        return
    problems = list(tokenizer_problems(tokenizer))
    yield from problems
    is_read = facts.vocab_size is not None or tokenizer.tokenizer_type == "NullTokenizer"
    if not (problems or is_read or facts.data_problems):
        yield Problem(
            f"--tokenizer-type {tokenizer.tokenizer_type}: the size of its vocabulary is not known",
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
            f"--padded-vocab-size {rows} is too small for {vocabulary} tokens",
            "leave --padded-vocab-size out (or auto): it is derived then",
        )


def device_is_there(draft: Draft) -> Problems:
    if draft.config.training.device == "cuda" and draft.facts.device != "cuda":
        yield Problem(
            "--device cuda is asked for, and no GPU was found", "use --device cpu, or check `nvidia-smi`"
        )


def world_size_is_for_dry_runs(draft: Draft) -> Problems:
    size = draft.config.parallel.world_size
    if size is not None and draft.config.training.dry_run is None:
        yield Problem(
            f"--world-size {size} is for --dry-run alone: a run has the ranks that are started",
            "add --dry-run, or leave --world-size out and start the ranks (torchrun --nproc-per-node, --nnodes)",
        )


def each_rank_has_a_gpu(draft: Draft) -> Problems:
    ranks, gpus = draft.facts.ranks_per_node, draft.facts.devices_per_node
    if draft.config.training.device == "cuda" and ranks is not None and gpus is not None and ranks > gpus:
        yield Problem(
            f"{ranks} ranks were started on a node on which {gpus} GPUs are visible",
            f"use torchrun --nproc-per-node {gpus}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
        )


def gpus_are_for_nccl(draft: Draft) -> Problems:
    if draft.config.training.device == "cuda" and draft.config.parallel.distributed_backend == "gloo":
        yield Problem(
            "--distributed-backend gloo does not carry the collectives of --device cuda",
            "leave --distributed-backend out (or auto), or use --device cpu",
        )


def save_interval_has_a_folder(draft: Draft) -> Problems:
    checkpoint = draft.config.checkpoint
    if checkpoint.save_interval is not None and checkpoint.save is None:
        yield Problem(
            f"--save-interval {checkpoint.save_interval} is given without --save",
            "add --save FOLDER, or leave --save-interval out",
        )


def missing_checkpoint_has_one_answer(draft: Draft) -> Problems:
    checkpoint = draft.config.checkpoint
    if checkpoint.load_or_start and checkpoint.exit_on_missing_checkpoint:
        yield Problem(
            "--load-or-start and --exit-on-missing-checkpoint contradict each other", "leave one of them out"
        )
    if checkpoint.load_or_start and checkpoint.load is None:
        yield Problem(
            "--load-or-start is given without --load", "add --load FOLDER, or leave --load-or-start out"
        )


RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    *SIZE_RULES,
    *PARALLEL_RULES,
    *MODEL_RULES,
    *LAYER_RULES,
    *TRANSFORMER_ENGINE_RULES,
    *EXPERT_RULES,
    training_has_one_length,
    kernels_can_be_compiled,
    samples_fill_a_batch,
    warmup_has_one_length,
    decay_has_one_length,
    warmup_ends_before_decay,
    learning_rates_are_in_order,
    *TRAINING_RULES,
    *DATA_RULES,
    vocabulary_is_known,
    end_of_document_is_known,
    padded_vocabulary_holds_all_tokens,
    device_is_there,
    world_size_is_for_dry_runs,
    each_rank_has_a_gpu,
    gpus_are_for_nccl,
    save_interval_has_a_folder,
    missing_checkpoint_has_one_answer,
    *LOG_RULES,
    *DETERMINISM_RULES,
    features_are_proven,
    *RESUME_RULES,
)
