"""What a user should hear although nothing is wrong: settings without effect, and departures from Megatron-LM."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.log_rules import LOG_NOTES
from megatrain.config.plan import Draft
from megatrain.config.resume import changed_settings
from megatrain.config.tree import flag_of


def sequence_parallel_alone(draft: Draft) -> Iterator[str]:
    parallel = draft.config.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1"


def dropout_by_default(draft: Draft) -> Iterator[str]:
    paths = ("model.hidden_dropout", "model.attention_dropout")
    on = [path for path in paths if draft.is_default(path) and draft.config.get(path) > 0]
    if on:
        said = " and ".join(f"{flag_of(path)} {draft.config.get(path)}" for path in on)
        yield f"{said} by default, as in Megatron-LM; most models are trained with 0 today"


def float32_by_default(draft: Draft) -> Iterator[str]:
    is_float32 = draft.derived.params_dtype == "float32"
    if is_float32 and draft.derived.device == "cuda" and not draft.is_given("precision.params_dtype"):
        yield "weights and arithmetic are float32 by default, as in Megatron-LM; --bf16 is several times faster on a GPU"


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


def end_of_document_was_guessed(draft: Draft) -> Iterator[str]:
    data = draft.config.data
    if draft.facts.tokenizer_note and (
        data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    ):
        yield draft.facts.tokenizer_note


def datasets_come_twice(draft: Draft) -> Iterator[str]:
    counts = Counter((dataset.split, dataset.digest) for dataset in draft.facts.datasets)
    twice = {d.prefix for d in draft.facts.datasets if counts[d.split, d.digest] > 1}
    if twice:
        yield f"{', '.join(sorted(twice))}: named twice, or of equal content: their samples come twice"


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
    dropout_by_default,
    float32_by_default,
    sequence_parallel_alone,
    distributed_optimizer_by_default,
    samples_left_over,
    split_has_no_effect,
    datasets_come_twice,
    end_of_document_was_guessed,
    positions_are_relative,
    attention_is_written_out,
    stop_without_saving,
    *LOG_NOTES,
    changed_since_the_checkpoint,
)
