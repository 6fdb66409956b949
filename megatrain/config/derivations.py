"""The values that follow from others, each with its reason. A derivation is found by the path that it fills.

DERIVATIONS  fill what the user left open, and all of `Derived`; later ones may use earlier ones
OVERRIDES    replace what the user gave where it cannot be had, as Megatron-LM's users expect, and say so in a note
"""

import dataclasses
import os.path
from collections.abc import Callable
from typing import Any, Final

from megatrain.config.attention import attention_backend
from megatrain.config.batch_sizes import BatchSizes, batch_sizes, parse_steps
from megatrain.config.data_plans import (
    requested_test_samples,
    requested_train_samples,
    requested_valid_samples,
    test_plan,
    train_plan,
    valid_plan,
)
from megatrain.config.errors import ConfigError
from megatrain.config.flops import padded_vocabulary, training_flops
from megatrain.config.layer_sizes import LayersError, LayerTable, condensed, layer_table
from megatrain.config.model import ModelConfig
from megatrain.config.mup import attention_scale, matrix_init_std
from megatrain.config.own_layers import is_usual, layer_function
from megatrain.config.plan import Activation, Answer, Draft
from megatrain.config.rate_groups import rate_groups
from megatrain.config.schedule_values import ScheduleValues
from megatrain.config.values import INVALID, UnsettledError

_LEAST_STARTUP_MINUTES: Final = 60


def device(draft: Draft) -> Answer:
    name = draft.facts.device_name
    if draft.facts.device == "cuda" and name is None and draft.config.training.dry_run is not None:
        return Answer("cuda", "what a run elsewhere is taken to have")
    return Answer(draft.facts.device, f"the device that was found{f', {name}' if name else ''}")


def data_parallel_sharding_strategy(draft: Draft) -> Answer:
    parallel = draft.config.parallel
    if parallel.use_megatron_fsdp:
        return Answer("optim_grads_params", "what --use-megatron-fsdp spreads: all (ZeRO-3)")
    if parallel.use_distributed_optimizer:
        return Answer("optim", "--use-distributed-optimizer")
    return Answer("no_shard", "--no-use-distributed-optimizer")


def distributed_backend(draft: Draft) -> Answer:
    where = draft.config.training.device
    return Answer("nccl" if where == "cuda" else "gloo", f"for {where}")


def kv_channels(draft: Draft) -> Answer:
    model = draft.config.model
    width = _whole(model.hidden_size, model.num_attention_heads)
    return Answer(width, f"hidden size {model.hidden_size} / {model.num_attention_heads} heads")


def ffn_hidden_size(draft: Draft) -> Answer:
    model = draft.config.model
    if model.swiglu or model.geglu:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        return Answer(width, f"4 * hidden size {model.hidden_size} * 2/3, down to a multiple of 64 (gated)")
    return Answer(4 * model.hidden_size, f"4 * hidden size {model.hidden_size}")


def activation(draft: Draft) -> Answer:
    return Answer(*activation_of(draft.config.model))


def mup_base_hidden_size(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(None, _WITHOUT_MUP)
    return Answer(_settled(model.hidden_size), "this model's own hidden size")


def mup_width_mult(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(1.0, _WITHOUT_MUP)
    width, base = model.hidden_size, _settled(model.mup_base_hidden_size)
    return Answer(width / base, f"hidden size {width} / base hidden size {base}")


def mup_output_mult(draft: Draft) -> Answer:
    model = draft.config.model
    if not model.use_mup:
        return Answer(1.0, _WITHOUT_MUP)
    return Answer(1.0 / model.mup_width_mult, f"1 / width multiplier {model.mup_width_mult:g}")


def scale_of_attention(draft: Draft) -> Answer:
    return Answer(*attention_scale(draft.config.model))


def init_std_of_matrices(draft: Draft) -> Answer:
    return Answer(*matrix_init_std(draft.config.model))


def rates(draft: Draft) -> Answer:
    return Answer(*rate_groups(draft.config.model, draft.config.optimizer, draft.derived.schedule))


def num_query_groups(draft: Draft) -> Answer:
    model = draft.config.model
    if model.group_query_attention:
        raise UnsettledError  # The rule `query_groups_are_given` asks for it.
    return Answer(model.num_attention_heads, f"one for each of {model.num_attention_heads} heads")


def heterogeneous_layers_config_encoded_json(draft: Draft) -> Answer:
    path, text = draft.config.model.heterogeneous_layers_config_path, draft.facts.layers_config
    if path is None:
        return Answer(None, "--heterogeneous-layers-config-path is not given")
    if text is None:
        raise UnsettledError  # The facts say why it could not be read.
    return Answer(condensed(text), f"read from {path}")


def spec_digest(draft: Draft) -> Answer:
    function = layer_function(draft.config.model.spec)
    if function is None:
        return Answer(None, "--spec is not given")
    if draft.facts.own_layers is None:
        raise UnsettledError  # The facts say why it could not be had.
    return Answer(draft.facts.own_layers.digest, f"of {function}")


def sizes_of_layers(draft: Draft) -> Answer:
    model, own = draft.config.model, draft.facts.own_layers
    function = layer_function(model.spec)
    if function is not None:
        if own is None:
            raise UnsettledError  # The facts say why they could not be had.
        return Answer(LayerTable(own.layers), f"by --spec {function}")
    text = _settled(model.heterogeneous_layers_config_encoded_json)
    try:
        table = layer_table(model)
    except LayersError:
        raise UnsettledError from None  # The rule `layers_are_understood` reports it.
    for layer in table.layers:
        hash(layer)  # trips over sizes that are not known
    where = model.heterogeneous_layers_config_path or "--heterogeneous-layers-config-encoded-json"
    return Answer(table, "equals --num-layers" if text is None else f"by {where}")


def kv_copies(draft: Draft) -> Answer:
    tp, table = draft.config.parallel.tensor_model_parallel_size, draft.derived.layer_table
    counts = {layer.num_query_groups for layer in table.layers if layer.num_heads}
    fewer = [count for count in counts if count < tp]
    groups = fewer[0] if fewer else draft.config.model.num_query_groups
    if tp <= groups or not counts:
        return Answer(1, f"{groups} key and value heads for {tp} tensor ranks")
    return Answer(_whole(tp, groups), f"{tp} tensor ranks for {groups} key and value heads")


def split(draft: Draft) -> Answer:
    if draft.config.data.mock_data:
        return Answer("1,1,1", "always so for mock data")
    return Answer("969, 30, 1", "Megatron-LM's default for files")


def data_cache_path(draft: Draft) -> Answer:
    if not draft.facts.datasets:
        return Answer(None, "there are no files")
    folder = os.path.dirname(draft.facts.datasets[0].prefix)  # noqa: PTH120 (a path such as `./a` stays as it is)
    return Answer(os.path.join(folder, "index_cache"), "beside the first dataset")  # noqa: PTH118


def params_dtype(draft: Draft) -> Answer:
    if draft.config.precision.bf16:
        return Answer("bfloat16", "--bf16")
    if draft.config.precision.fp16:
        return Answer("float16", "--fp16")
    return Answer("float32", "without --bf16 and --fp16")


def resolved_device(draft: Draft) -> Answer:
    return Answer(_settled(draft.config.training.device), "equals --device")


def resolved_params_dtype(draft: Draft) -> Answer:
    return Answer(_settled(draft.config.precision.params_dtype), "equals --params-dtype")


def main_dtype(draft: Draft) -> Answer:
    weights = draft.config.precision.params_dtype
    return Answer("float64" if weights == "float64" else "float32", f"for {weights} weights")


def world_size(draft: Draft) -> Answer:
    return Answer(draft.facts.world_size, "ranks that were started")


def model_parallel_size(draft: Draft) -> Answer:
    parallel = draft.config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return Answer(tp * pp, f"tp {tp} * pp {pp}")


def data_parallel_size(draft: Draft) -> Answer:
    world, replica = draft.derived.world_size, draft.derived.model_parallel_size
    return Answer(_whole(world, replica), f"{world} ranks / (tp * pp = {replica})")


def startup_timeout_seconds(draft: Draft) -> Answer:
    minutes = draft.config.parallel.distributed_timeout_minutes
    if minutes > _LEAST_STARTUP_MINUTES:
        return Answer(60 * minutes, "--distributed-timeout-minutes")
    return Answer(
        60 * _LEAST_STARTUP_MINUTES, "an hour at least: ranks wait for each other's indices and caches"
    )


def collective_timeout_seconds(draft: Draft) -> Answer:
    parallel = draft.config.parallel
    if parallel.distributed_timeout_seconds_after_init is not None:
        return Answer(
            _settled(parallel.distributed_timeout_seconds_after_init),
            "--distributed-timeout-seconds-after-init",
        )
    return Answer(60 * parallel.distributed_timeout_minutes, "--distributed-timeout-minutes")


def global_batch_size(draft: Draft) -> Answer:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    if training.step_batch_size_schedule is not None:
        try:
            steps = parse_steps(training.step_batch_size_schedule, seq_length=draft.config.data.seq_length)
        except ConfigError:
            raise UnsettledError from None  # The rule `batch_sizes_make_sense` reports it.
        return Answer(steps.sizes[-1], "the last of --step-batch-size-schedule")
    return Answer(training.micro_batch_size * dp, f"micro-batch {training.micro_batch_size} * dp {dp}")


def num_microbatches(draft: Draft) -> Answer:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _passes(draft, training.global_batch_size, dp)


def eval_global_batch_size(draft: Draft) -> Answer:
    batch = _settled(draft.config.training.global_batch_size)
    if draft.config.training.decrease_batch_size_if_needed:
        per_pass = draft.config.training.micro_batch_size * draft.derived.data_parallel_size
        return Answer(batch // per_pass * per_pass, f"global batch {batch} down to a multiple of {per_pass}")
    return Answer(batch, "equals --global-batch-size")


def num_eval_microbatches(draft: Draft) -> Answer:
    training, dp = draft.config.training, draft.derived.data_parallel_size
    return _passes(draft, training.eval_global_batch_size, dp)


def _passes(draft: Draft, batch: int, dp: int) -> Answer:
    micro = draft.config.training.micro_batch_size
    is_decreased = draft.config.training.decrease_batch_size_if_needed
    count = batch // (micro * dp) if is_decreased else _whole(batch, micro * dp)
    rounded = ", rounded down" if batch % (micro * dp) else ""
    return Answer(count, f"global batch {batch} / (micro-batch {micro} * dp {dp}){rounded}")


def train_iters(draft: Draft) -> Answer:
    training, derived = draft.config.training, draft.derived
    if training.train_iters is not None:
        return Answer(_settled(training.train_iters), "--train-iters")
    if training.train_samples is None:
        raise UnsettledError  # The rule `training_has_one_length` reports it.
    sizes = _batch_sizes(draft)
    to_come = sizes.iterations_to(
        training.train_samples,
        consumed=derived.start_consumed_samples,
        fills_up=training.step_batch_size_schedule is not None,
    )
    done = f"{derived.start_iteration} done, and " if derived.start_iteration else ""
    samples = f"{training.train_samples - derived.start_consumed_samples if done else training.train_samples} samples"
    is_constant = len(sizes.rule.sizes) == 1
    return Answer(
        derived.start_iteration + to_come,
        f"{done}{samples} // global batch {sizes.at(0)}"
        if is_constant
        else f"{done}{samples} in batches of {sizes.rule.sizes[0]} to {sizes.rule.sizes[-1]}",
    )


def train_samples(draft: Draft) -> Answer:
    derived, sizes = draft.derived, _batch_sizes(draft)
    to_come = max(derived.train_iters - derived.start_iteration, 0)
    samples = sizes.samples_after(to_come, consumed=derived.start_consumed_samples)
    if len(sizes.rule.sizes) > 1:
        return Answer(samples, f"what {derived.train_iters} iterations read, as the batch grows")
    if samples != derived.train_iters * sizes.at(0):
        return Answer(
            samples,
            f"{derived.start_consumed_samples} so far + {to_come} iterations * global batch {sizes.at(0)}",
        )
    return Answer(samples, f"{derived.train_iters} iterations * global batch {sizes.at(0)}")


def lr_decay_samples(draft: Draft) -> Answer:
    schedule = draft.config.schedule
    if schedule.lr_decay_samples is not None:
        return Answer(_settled(schedule.lr_decay_samples), "--lr-decay-samples")
    if schedule.lr_decay_iters is not None:
        return _samples_of(draft, schedule.lr_decay_iters)
    return Answer(_samples_of_training(draft).value, "to the end of training")


def lr_warmup_samples(draft: Draft) -> Answer:
    schedule = draft.config.schedule
    if schedule.lr_warmup_fraction is not None:
        decay = draft.derived.lr_decay_samples
        return Answer(
            schedule.lr_warmup_fraction * decay, f"{schedule.lr_warmup_fraction} of {decay} decay samples"
        )
    if schedule.lr_warmup_samples:
        return Answer(schedule.lr_warmup_samples, "--lr-warmup-samples")
    return _samples_of(draft, schedule.lr_warmup_iters)


def lr_wsd_decay_samples(draft: Draft) -> Answer:
    schedule = draft.config.schedule
    if schedule.lr_decay_style != "WSD":
        return Answer(None, "the decay is not WSD")
    if schedule.lr_wsd_decay_samples is not None:
        return Answer(_settled(schedule.lr_wsd_decay_samples), "--lr-wsd-decay-samples")
    if schedule.lr_wsd_decay_iters is None:
        raise UnsettledError  # The rule `wsd_decay_has_one_length` reports it.
    return _samples_of(draft, schedule.lr_wsd_decay_iters)


def schedule(draft: Draft) -> Answer:
    config, derived, optimizer = draft.config.schedule, draft.derived, draft.config.optimizer
    is_constant = config.weight_decay_incr_style == "constant"
    start, end = config.start_weight_decay, config.end_weight_decay
    if not is_constant and (start is None or end is None):
        raise UnsettledError  # The rule `weight_decay_says_how_it_moves` reports it.
    own = ScheduleValues(
        lr=_settled(optimizer.lr),
        min_lr=_settled(config.min_lr),
        decoupled_lr=_settled(optimizer.decoupled_lr),
        decoupled_min_lr=_settled(optimizer.decoupled_min_lr),
        lr_warmup_init=_settled(config.lr_warmup_init),
        lr_decay_style=_settled(config.lr_decay_style),
        lr_warmup_samples=_settled(derived.lr_warmup_samples),
        lr_decay_samples=_settled(derived.lr_decay_samples),
        lr_wsd_decay_style=_settled(config.lr_wsd_decay_style),
        lr_wsd_decay_samples=_settled(derived.lr_wsd_decay_samples),
        start_weight_decay=_settled(optimizer.weight_decay if is_constant else start),
        end_weight_decay=_settled(optimizer.weight_decay if is_constant else end),
        weight_decay_incr_style=_settled(config.weight_decay_incr_style),
        weight_decay_incr_samples=_samples_of_training(draft).value,
    )
    stored = draft.facts.checkpoint.schedule if draft.facts.checkpoint else None
    if stored and draft.continues_optimizer and config.use_checkpoint_opt_param_scheduler:
        return Answer(dataclasses.replace(own, **stored), "the checkpoint's")
    return Answer(own, "of this run")


def _samples_of(draft: Draft, iterations: int) -> Answer:
    batch = draft.config.training.global_batch_size
    return Answer(iterations * batch, f"{iterations} iterations * global batch {batch}")


def _samples_of_training(draft: Draft) -> Answer:
    """As schedules count it: whether or not samples are left over, or the batch was another one before."""
    training = draft.config.training
    if training.train_samples is not None:
        return Answer(_settled(training.train_samples), "--train-samples")
    return _samples_of(draft, draft.derived.train_iters)


def _batch_sizes(draft: Draft) -> BatchSizes:
    """The sizes of iterations, if they can be had; rules report it if not."""
    try:
        sizes = batch_sizes(draft.config, data_parallel_size=draft.derived.data_parallel_size)
    except ConfigError:
        raise UnsettledError from None
    if sizes.misfits(is_decreased=draft.config.training.decrease_batch_size_if_needed):
        raise UnsettledError
    return sizes


def vocab_size(draft: Draft) -> Answer:
    given, found = draft.config.tokenizer.vocab_size, draft.facts.vocab_size
    if found is not None:
        return Answer(found, "the tokenizer's")
    if given is None:
        raise UnsettledError  # The rule `vocabulary_is_known` reports it.
    return Answer(_settled(given), "--vocab-size")


def eod_id(draft: Draft) -> Answer:
    if draft.facts.vocab_size is not None or draft.facts.eod_id is not None:
        reason = "the tokenizer names none" if draft.facts.eod_id is None else "the tokenizer's"
        return Answer(draft.facts.eod_id, reason)
    given = draft.config.tokenizer.null_tokenizer_eod_id
    if given is not None:
        return Answer(_settled(given), "--null-tokenizer-eod-id")
    return Answer(draft.derived.vocab_size - 1, "the last token, as there is no tokenizer file")


def padded_vocab_size(draft: Draft) -> Answer:
    vocabulary, tp = draft.derived.vocab_size, draft.config.parallel.tensor_model_parallel_size
    multiple = draft.config.model.make_vocab_size_divisible_by
    rows = padded_vocabulary(vocabulary, divisible_by=multiple, tp_size=tp)
    return Answer(rows, f"{vocabulary} up to a multiple of {multiple} * tp {tp}")


def resolved_padded_vocab_size(draft: Draft) -> Answer:
    return Answer(_settled(draft.config.model.padded_vocab_size), "equals --padded-vocab-size")


def tokens_per_iteration(draft: Draft) -> Answer:
    batch, length = draft.config.training.global_batch_size, draft.config.data.seq_length
    return Answer(batch * length, f"global batch {batch} * {length} tokens")


def flops_per_iteration(draft: Draft) -> Answer:
    tokens = draft.derived.tokens_per_iteration
    operations = training_flops(
        draft.config.model,
        draft.derived.layer_table,
        num_tokens=tokens,
        sum_of_squared_lengths=tokens * draft.config.data.seq_length,
    )
    return Answer(
        operations, f"{operations / tokens:.4g} for each of {tokens} tokens, recomputation not counted"
    )


def start_iteration(draft: Draft) -> Answer:
    stored = draft.facts.checkpoint
    return Answer(stored.iteration, f"{stored.path}") if stored else Answer(0, "a fresh run")


def start_consumed_samples(draft: Draft) -> Answer:
    stored = draft.facts.checkpoint
    return Answer(stored.consumed_train_samples, f"{stored.path}") if stored else Answer(0, "a fresh run")


def plain_gpt_layers(draft: Draft) -> Answer | None:
    words = draft.config.model.spec
    if not is_usual(words):
        return None
    return Answer(
        (),
        f"--spec {' '.join(words)}: a GPT layer is built from --normalization, --swiglu and their like, of the parts that"
        " --transformer-impl names",
    )


def output_multiplier_by_width(draft: Draft) -> Answer | None:
    model = draft.config.model
    if not model.use_mup or model.mup_output_mult != 1 or model.mup_width_mult == 1:
        return None
    given = 1.0 / model.mup_width_mult
    return Answer(
        given,
        f"--mup-output-mult 1 with --use-mup stands for 1 / width multiplier, as in Megatron-LM: {given:g}",
    )


def gloo_without_gpu(draft: Draft) -> Answer | None:
    is_misfit = draft.config.training.device == "cpu" and draft.config.parallel.distributed_backend == "nccl"
    return (
        Answer("gloo", "--distributed-backend nccl needs GPUs; on CPUs gloo is used") if is_misfit else None
    )


def nothing_is_sharded(draft: Draft) -> Answer | None:
    path, parallel = "parallel.use_distributed_optimizer", draft.config.parallel
    is_open = parallel.use_distributed_optimizer and draft.is_default(path)
    if parallel.data_parallel_sharding_strategy != "no_shard" or not is_open:
        return None
    return Answer(
        False, "--data-parallel-sharding-strategy no_shard: optimizer state is not spread over ranks"
    )


def even_split_of_mock_data(draft: Draft) -> Answer | None:
    given = draft.config.data.split
    if not draft.config.data.mock_data or given == "1,1,1":
        return None
    return Answer("1,1,1", f"--split {given} has no effect: mock data is split 1,1,1, as in Megatron-LM")


def activation_of(model: ModelConfig) -> tuple[Activation, str]:
    """What stands between the MLP's two layers, and why."""
    if model.swiglu:
        return "swiglu", "--swiglu"
    if model.geglu:
        return "geglu_tanh", "--geglu: GELU by tanh"
    if model.quick_geglu:
        return "quick_geglu", "--quick-geglu"
    if model.squared_relu:
        return "squared_relu", "--squared-relu"
    if model.disable_bias_linear:
        return "gelu", "exact, as in Megatron-LM without biases (--disable-bias-linear)"
    if model.no_bias_gelu_fusion:
        return "gelu", "exact, as in Megatron-LM with --no-bias-gelu-fusion"
    return "gelu_tanh", "GELU by tanh, as Megatron-LM fuses it with biases"


_WITHOUT_MUP: Final = "--use-mup is off"


def _whole(amount: int, parts: int) -> int:
    """The quotient, if it is whole; a rule reports it if not."""
    if amount % parts:
        raise UnsettledError
    return amount // parts


def _settled(value: Any) -> Any:
    """The value itself; trips over INVALID, which could pass through otherwise."""
    if value is INVALID:
        raise UnsettledError
    return value


DERIVATIONS: Final[tuple[tuple[str, Callable[[Draft], Answer]], ...]] = (
    ("training.device", device),
    ("derived.device", resolved_device),
    ("parallel.distributed_backend", distributed_backend),
    ("parallel.data_parallel_sharding_strategy", data_parallel_sharding_strategy),
    ("model.kv_channels", kv_channels),
    ("model.ffn_hidden_size", ffn_hidden_size),
    ("model.num_query_groups", num_query_groups),
    ("model.heterogeneous_layers_config_encoded_json", heterogeneous_layers_config_encoded_json),
    ("model.spec_digest", spec_digest),
    ("derived.layer_table", sizes_of_layers),
    ("derived.kv_copies", kv_copies),
    ("derived.activation", activation),
    ("model.mup_base_hidden_size", mup_base_hidden_size),
    ("model.mup_width_mult", mup_width_mult),
    ("model.mup_output_mult", mup_output_mult),
    ("derived.attention_scale", scale_of_attention),
    ("derived.matrix_init_std", init_std_of_matrices),
    ("data.split", split),
    ("data.data_cache_path", data_cache_path),
    ("precision.params_dtype", params_dtype),
    ("derived.params_dtype", resolved_params_dtype),
    ("derived.main_dtype", main_dtype),
    ("derived.attention_backend", attention_backend),
    ("derived.world_size", world_size),
    ("derived.model_parallel_size", model_parallel_size),
    ("derived.data_parallel_size", data_parallel_size),
    ("derived.startup_timeout_seconds", startup_timeout_seconds),
    ("derived.collective_timeout_seconds", collective_timeout_seconds),
    ("training.global_batch_size", global_batch_size),
    ("derived.num_microbatches", num_microbatches),
    ("training.eval_global_batch_size", eval_global_batch_size),
    ("derived.num_eval_microbatches", num_eval_microbatches),
    ("derived.start_iteration", start_iteration),
    ("derived.start_consumed_samples", start_consumed_samples),
    ("derived.train_iters", train_iters),
    ("derived.train_samples", train_samples),
    ("derived.requested_train_samples", requested_train_samples),
    ("derived.requested_valid_samples", requested_valid_samples),
    ("derived.requested_test_samples", requested_test_samples),
    ("derived.train_plan", train_plan),
    ("derived.valid_plan", valid_plan),
    ("derived.test_plan", test_plan),
    ("derived.lr_decay_samples", lr_decay_samples),
    ("derived.lr_warmup_samples", lr_warmup_samples),
    ("derived.lr_wsd_decay_samples", lr_wsd_decay_samples),
    ("derived.schedule", schedule),
    ("derived.rate_groups", rates),
    ("derived.vocab_size", vocab_size),
    ("derived.eod_id", eod_id),
    ("model.padded_vocab_size", padded_vocab_size),
    ("derived.padded_vocab_size", resolved_padded_vocab_size),
    ("derived.tokens_per_iteration", tokens_per_iteration),
    ("derived.flops_per_iteration", flops_per_iteration),
)

OVERRIDES: Final[tuple[tuple[str, Callable[[Draft], Answer | None]], ...]] = (
    ("model.spec", plain_gpt_layers),
    ("model.mup_output_mult", output_multiplier_by_width),
    ("parallel.distributed_backend", gloo_without_gpu),
    ("parallel.use_distributed_optimizer", nothing_is_sharded),
    ("data.split", even_split_of_mock_data),
)
