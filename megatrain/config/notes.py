"""What a user should hear although nothing is wrong: settings without effect, and departures from Megatron-LM."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.plan import Draft
from megatrain.config.resume import changed_settings


def sequence_parallel_alone(draft: Draft) -> Iterator[str]:
    parallel = draft.config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1"


def distributed_optimizer_by_default(draft: Draft) -> Iterator[str]:
    path = "parallel.use_distributed_optimizer"
    if draft.is_default(path) and draft.derived.data_parallel_size > 1:
        yield (
            "optimizer state is spread over the data-parallel ranks; Megatron-LM does so only with"
            " --use-distributed-optimizer (--no-use-distributed-optimizer turns it off)"
        )


def samples_left_over(draft: Draft) -> Iterator[str]:
    training = draft.config.training
    if training.train_samples is not None and training.train_samples % training.global_batch_size:
        rest = training.train_samples % training.global_batch_size
        yield f"the last {rest} of --train-samples {training.train_samples} do not fill a global batch and are left out"


def split_has_no_effect(draft: Draft) -> Iterator[str]:
    is_apart = any(dataset.split != "all" for dataset in draft.facts.datasets)
    if is_apart and draft.is_given("data.split"):
        yield f"--split {draft.config.data.split} has no effect: each split has data of its own"


def positions_are_relative(draft: Draft) -> Iterator[str]:
    kind = draft.config.model.position_embedding_type
    if draft.config.data.reset_position_ids and kind in ("rope", "yarn"):
        yield (
            f"--reset-position-ids has no effect with --position-embedding-type {kind}, as in Megatron-LM: rotary"
            " embeddings see distances alone"
        )


def attention_is_written_out(draft: Draft) -> Iterator[str]:
    model = draft.config.model
    reasons = {
        f"--attention-dropout {model.attention_dropout}": bool(model.attention_dropout),
        f"--attn-logit-softcapping {model.attn_logit_softcapping}": model.attn_logit_softcapping is not None,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
    }
    given = [reason for reason, holds in reasons.items() if holds]
    if given:
        yield (
            f"{' and '.join(given)}: attention holds all scores in memory, no fused kernel does this yet; memory and time"
            " grow with the square of --seq-length"
        )


def stop_without_saving(draft: Draft) -> Iterator[str]:
    resilience = draft.config.resilience
    if draft.config.checkpoint.save is None and (
        resilience.exit_interval or resilience.exit_duration_in_mins
    ):
        yield "the run will stop early without saving anything: --save is not given"


def changed_since_the_checkpoint(draft: Draft) -> Iterator[str]:
    changed = changed_settings(draft)
    if changed:
        yield f"changed since the checkpoint: {', '.join(changed)}"


NOTES: Final[tuple[Callable[[Draft], Iterator[str]], ...]] = (
    sequence_parallel_alone,
    distributed_optimizer_by_default,
    samples_left_over,
    split_has_no_effect,
    positions_are_relative,
    attention_is_written_out,
    stop_without_saving,
    changed_since_the_checkpoint,
)
