"""Derived values and their reasons; all problems are reported at once."""

import dataclasses
import importlib

import pytest

from megatrain.config import ConfigError, Facts, Problem, StoredRun, fixes, parse, resolve
from megatrain.config.plan import Derived
from megatrain.config.registry import rule
from megatrain.config.rule_list import DERIVATIONS, RULES
from megatrain.config.schema.tree import Config, settings
from megatrain.config.schema.values import INVALID, OpenError, UnresolvedError, is_resolved

resolving = importlib.import_module("megatrain.config.resolve")  # the package exports a function of this name


def test_derived_values_have_a_reason(plan_of):
    plan = plan_of("--global-batch-size 16 --tensor-model-parallel-size 2", facts=Facts(world_size=8))
    assert plan.config.model.ffn_hidden_size == 128
    assert plan.config.model.kv_channels == 16
    assert plan.config.model.num_query_groups == 4
    assert plan.derived.data_parallel_size == 4
    assert plan.derived.num_microbatches == 2
    assert (
        str(plan.origins["derived.num_microbatches"]) == "derived: global batch 16 / (micro-batch 2 * dp 4)"
    )
    assert str(plan.origins["model.kv_channels"]) == "derived: hidden size 64 / 4 heads"
    assert str(plan.origins["training.global_batch_size"]) == "--global-batch-size"


def test_nothing_is_left_open(plan_of):
    plan = plan_of()
    assert all(is_resolved(plan.config.get(setting.path)) for setting in settings())
    assert all(is_resolved(value) for value in vars(plan.derived).values())


def test_every_derived_field_has_a_derivation():
    derived = {one.path.removeprefix("derived.") for one in DERIVATIONS if one.path.startswith("derived.")}
    assert derived == {field.name for field in dataclasses.fields(Derived)}
    filled = {one.path for one in DERIVATIONS}
    assert {setting.path for setting in settings() if setting.is_derived_if_open} <= filled


def test_ffn_size_without_a_gate_is_four_times_hidden():
    flags = "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --tensor-model-parallel-size 5"
    with pytest.raises(ConfigError) as caught:
        resolve(parse(flags.split()), Facts(world_size=5))
    assert any("--ffn-hidden-size 384" in problem.text for problem in caught.value.problems)


@pytest.mark.parametrize(("interval", "valid"), [("--eval-interval 3", (10 // 3 + 1) * 5 * 8), ("", 5 * 8)])
def test_evaluations_request_their_samples(plan_of, interval, valid):
    derived = plan_of(f"--global-batch-size 8 --eval-iters 5 {interval}").derived
    assert (derived.requested_valid_samples, derived.requested_test_samples) == (valid, 5 * 8)


def test_flops_follow_the_formula(plan_of):
    derived = plan_of("--global-batch-size 2").derived
    layer = 3 * 64 * 128 + 64 * (64 + 2 * 64) + 64 * 64
    expected = 6 * (256 * (4 * layer + 64 * 128) + 2 * 128 * 128 * 4 * 64)
    assert derived.flops_per_iteration == expected
    assert derived.tokens_per_iteration == 256


def test_dtypes_follow_bf16(plan_of):
    assert plan_of().config.precision.params_dtype == "float32"
    plan = plan_of("--bf16")
    assert (plan.config.precision.params_dtype, plan.derived.master_dtype) == ("bfloat16", "float32")
    assert plan_of("--params-dtype float64").derived.master_dtype == "float64"


def test_the_split_follows_the_data(plan_of):
    assert plan_of().config.data.split == "1,1,1"
    files = plan_of("--data-path a --tokenizer-type NullTokenizer", without="--mock-data")
    assert files.config.data.split == "969, 30, 1"
    ignored = plan_of("--split 99,1,0")
    assert ignored.config.data.split == "1,1,1"
    assert any("--split 99,1,0 has no effect" in note for note in ignored.notes)


def test_the_device_decides_the_backend(plan_of):
    gpu = Facts(device="cuda", device_name="NVIDIA H200")
    assert plan_of().config.parallel.distributed_backend == "gloo"
    assert plan_of(facts=gpu).config.parallel.distributed_backend == "nccl"
    assert plan_of("--device cpu", facts=gpu).config.parallel.distributed_backend == "gloo"
    moved = plan_of("--distributed-backend nccl")
    assert moved.config.parallel.distributed_backend == "gloo"
    assert any("nccl needs GPUs" in note for note in moved.notes)


def test_the_tokenizer_decides_the_vocabulary(plan_of):
    facts = Facts(vocab_size=3000, eod_id=7)
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --tensor-model-parallel-size 1"
    tokens = plan_of(flags, without="--vocab-size", facts=facts)
    assert (tokens.derived.vocab_size, tokens.config.model.padded_vocab_size, tokens.derived.eod_id) == (
        3000,
        3072,
        7,
    )
    counted = plan_of(f"{flags} --vocab-size 3072", facts=facts)
    assert (counted.derived.vocab_size, counted.derived.eod_id) == (3072, 7)
    assert "the tokenizer's 3000" in str(counted.origins["derived.vocab_size"])
    given = plan_of("--padded-vocab-size 100")
    assert (given.derived.vocab_size, given.config.model.padded_vocab_size, given.derived.eod_id) == (
        100,
        100,
        99,
    )


def test_a_run_starts_at_its_checkpoint(plan_of):
    stored = StoredRun(path="c", iteration=5, consumed_train_samples=10, config={})
    derived = plan_of(facts=Facts(checkpoint=stored)).derived
    assert (derived.start_iteration, derived.start_consumed_samples) == (5, 10)


def test_all_problems_come_at_once(problems_of):
    facts = Facts(world_size=3, data_problems=(Problem("a.idx: cut short", "make it again"),))
    found = "\n".join(
        problems_of(
            "--num-layer 3 --lr fast --num-attention-heads 6 --tensor-model-parallel-size 4 --train-samples 5",
            without="--seq-length",
            facts=facts,
        )
    )
    for words in (
        "--num-layer is not a flag",
        "--lr fast is not a number",
        "a.idx: cut short",
        "--seq-length is missing",
        "--num-attention-heads 6",
        "--tensor-model-parallel-size 4",
        "3 ranks were started",
        "--train-samples 5 is not supported together with --train-iters 10",
    ):
        assert words in found


def test_one_rank_is_too_few(problems_of):
    (problem,) = problems_of("--tensor-model-parallel-size 2", facts=Facts(world_size=1))
    assert problem.startswith("1 rank was started, which is not a multiple of --tensor-model-parallel-size 2")


def test_an_invalid_value_is_reported_once(problems_of):
    assert problems_of("--hidden-size x") == [
        "--hidden-size x is not a whole number\n  fix: give --hidden-size a whole number at least 1"
    ]
    assert len(problems_of("--tensor-model-parallel-size 0")) == 1
    assert len(problems_of("", without="--seq-length")) == 1


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.path)
def test_one_invalid_value_never_breaks_resolving(setting, problems_of):
    """One invalid value gives one problem, in a ConfigError."""
    if setting.kind is bool:
        flags = f"{setting.flag}=perhaps"
    else:
        flags = f"{setting.flag} {'!' if setting.choices or setting.kind is not str else ''}"
    assert len(problems_of(flags)) == 1


def test_values_out_of_range_are_found_without_a_command_line(plan_of):
    request = parse([])
    request = dataclasses.replace(request, config=request.config.with_values({"model.num_layers": 0}))
    with pytest.raises(ConfigError, match="--num-layers 0 must be at least 1"):
        resolve(request, Facts())


def test_resolving_is_pure(plan_of):
    facts = Facts(world_size=2)
    assert plan_of(facts=facts) == plan_of(facts=facts)


def test_reading_an_invalid_value_raises():
    config = Config().with_values({"model.num_layers": INVALID})
    for read in (lambda: config.model.num_layers, lambda: config.get("model.num_layers")):
        with pytest.raises(UnresolvedError):
            read()
    with pytest.raises(OpenError):
        Derived().train_iters  # noqa: B018 (reading it raises)
    assert config.raw("model.num_layers") is INVALID
    assert config.with_values({"model.hidden_size": 64}).raw("model.num_layers") is INVALID


def test_left_over_samples_are_noted(plan_of):
    (note,) = plan_of("--train-samples 21", without="--train-iters").notes
    assert "the last 1 of --train-samples 21" in note


def test_facts_survive_json():
    stored = StoredRun(path="c", iteration=5, consumed_train_samples=10, config={"model": {"num_layers": 3}})
    facts = Facts(
        world_size=4,
        vocab_size=9,
        checkpoint=stored,
        data_problems=(Problem("a", "b"),),
        libraries={"torch": "2.11"},
    )
    assert Facts.from_json(facts.to_json()) == facts
    assert Facts.from_json(Facts().to_json()) == Facts()


@pytest.mark.parametrize(
    ("flags", "startup", "later"),
    [
        ("", 3600, 600),
        ("--distributed-timeout-minutes 30", 3600, 1800),
        ("--distributed-timeout-minutes 90", 5400, 5400),
        ("--distributed-timeout-seconds-after-init 45", 3600, 45),
    ],
)
def test_collectives_have_a_longer_timeout_at_start(plan_of, flags, startup, later):
    derived = plan_of(flags).derived
    assert (derived.startup_timeout_seconds, derived.collective_timeout_seconds) == (startup, later)


@pytest.mark.parametrize(
    ("flags", "strategy", "is_on"),
    [
        ("", "optim", True),
        ("--no-use-distributed-optimizer", "no_shard", False),
        ("--data-parallel-sharding-strategy no_shard", "no_shard", False),
        ("--data-parallel-sharding-strategy optim_grads", "optim_grads", True),
        ("--use-megatron-fsdp", "optim_grads_params", True),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "optim", True),
        ("--use-torch-fsdp2", "optim_grads_params", True),
    ],
)
def test_several_flags_set_the_sharding(plan_of, flags, strategy, is_on):
    parallel = plan_of(flags).config.parallel
    assert parallel.data_parallel_sharding_strategy == strategy
    assert parallel.use_distributed_optimizer is is_on


def test_the_function_of_spec_is_called_once_however_many_fixes_are_tried(problems_of):
    calls = []

    def layers(model, default):
        calls.append(model)
        return default

    facts = Facts(world_size=6, digests={"model.spec": "1"}, custom_layers=layers)
    found = problems_of(
        "--spec my.py:layers --tensor-model-parallel-size 3 --global-batch-size 12", facts=facts
    )
    assert len(calls) == 1
    assert any("use --tensor-model-parallel-size 2" in problem for problem in found), found
    assert not any("use --num-attention-heads" in problem for problem in found), "its layers are not known"


def test_a_fix_with_a_wrong_value_is_not_the_first_choice(arguments_of):
    wrong, right = {"model.num_layers": 0}, {"model.num_layers": 2}

    @rule
    def layers_are_few(draft):
        if draft.config.model.num_layers > 2:
            yield Problem("too many", fixes.words(fixes.best(draft, (wrong, right))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "RULES", (*RULES, layers_are_few))
        with pytest.raises(ConfigError, match="--num-layers 2"):
            resolve(parse(arguments_of("", "")), Facts())
