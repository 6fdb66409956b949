"""Flags set their fields; mistakes are named with their remedy."""

import resource
import subprocess
import sys

import pytest

from megatrain import __version__
from megatrain.config import Origin, parse
from megatrain.config.cli.help_text import field_help
from megatrain.config.schema.tree import settings
from megatrain.config.schema.values import AUTO, REQUIRED, is_resolved


def value(path, *argv):
    request = parse(argv)
    assert request.problems == ()
    return request.config.get(path)


def problems(*argv):
    return [str(problem) for problem in parse(argv).problems]


def test_defaults_are_open_or_values():
    config = parse([]).config
    assert config.model.num_layers is REQUIRED
    assert config.model.kv_channels is AUTO
    assert config.training.eval_iters == 100


@pytest.mark.parametrize(
    ("argv", "path", "expected"),
    [
        (["--num-layers", "12"], "model.num_layers", 12),
        (["--num-layers=12"], "model.num_layers", 12),
        (["--num_layers", "12"], "model.num_layers", 12),
        (["--num_layers=1_000"], "model.num_layers", 1000),
        (["--lr", "1e-4"], "optimizer.lr", 1e-4),
        (["--rotary-base", "500000"], "model.rotary_base", 500000.0),
        (["--bf16"], "precision.bf16", True),
        (["--bf16", "--no-bf16"], "precision.bf16", False),
        (["--bf16=false"], "precision.bf16", False),
        (["--no-use-distributed-optimizer"], "parallel.use_distributed_optimizer", False),
        (["--no_use_distributed_optimizer"], "parallel.use_distributed_optimizer", False),
        (["--no-mmap-bin-files"], "data.no_mmap_bin_files", True),
        (["--mmap-bin-files"], "data.no_mmap_bin_files", False),
        (["--no-load-optim"], "checkpoint.no_load_optim", True),
        (["--data-path", "a", "b"], "data.data_path", ("a", "b")),
        (["--save", "a_b/c-d"], "checkpoint.save", "a_b/c-d"),
        (["--save", "none"], "checkpoint.save", None),
        (["--data-path", "x", "--data-path", "none"], "data.data_path", ()),
        (["--split", "9,1", "--split", "none"], "data.split", AUTO),
        (["--ffn-hidden-size", "none"], "model.ffn_hidden_size", AUTO),
        (["--moe-router-load-balancing-type", "none"], "experts.moe_router_load_balancing_type", ("none",)),
        (["--eval-interval", "none"], "training.eval_interval", None),
        (["--kv-channels", "auto"], "model.kv_channels", AUTO),
        (["--position-embedding-type", "none"], "model.position_embedding_type", "none"),
        (["--lr", "1", "--lr", "2"], "optimizer.lr", 2.0),
        (["--lr", "1", "--lr=2"], "optimizer.lr", 2.0),
        (["--data-path", "a", "b", "--data_path", "c"], "data.data_path", ("c",)),
        (["--num-layers", "2", "--encoder-num-layers", "3"], "model.num_layers", 3),
        (["--recompute-modules", "moe_act", "mlp"], "training.recompute_modules", ("moe_act", "mlp")),
        (["--recompute-modules", "[moe_act mlp]"], "training.recompute_modules", ("moe_act", "mlp")),
        (["--recompute-modules", "[moe_act,", "mlp]"], "training.recompute_modules", ("moe_act", "mlp")),
        (["--recompute-modules", "[moe_act]"], "training.recompute_modules", ("moe_act",)),
        (["--profile-ranks=[0,3]"], "logging.profile_ranks", (0, 3)),
        (["--moe-layer-freq", "([0]*3+[1]*45)"], "experts.moe_layer_freq", "([0]*3+[1]*45)"),
        (["--moe-layer-freq", "[0]*1", "+", "[1]*3"], "experts.moe_layer_freq", "[0]*1 + [1]*3"),
        (["--split", "969,", "30,", "1"], "data.split", "969, 30, 1"),
        (
            ["--step-batch-size-schedule", "0:384", "2B:768"],
            "training.step_batch_size_schedule",
            "0:384 2B:768",
        ),
        (["--step-batch-size-schedule", "0:384 2B:768"], "training.step_batch_size_schedule", "0:384 2B:768"),
        (["--save", "${ROOT}/ckpt"], "checkpoint.save", "${ROOT}/ckpt"),
        (["--data-path", "-"], "data.data_path", ("-",)),
    ],
)
def test_a_flag_sets_its_field(argv, path, expected):
    found = value(path, *argv)
    assert found == expected
    assert type(found) is type(expected)


MISTAKES = [
    (["--num-layer", "3"], "--num-layer is not a flag", "--num-layers?"),
    (["--NUM_LAYERS", "3"], "--NUM_LAYERS is not a flag", "--num-layers?"),
    (["--xyzzy=1"], "--xyzzy is not a flag", "leave it out"),
    (["-M*"], "-M* is not a flag", "write = before -M*"),
    (["--num-layers"], "--num-layers has no value", "--num-layers a whole number at least 1"),
    (["--data-path"], "--data-path has no value", "--data-path one or more values"),
    (["--config"], "--config has no value", "YAML file"),
    (["--num-layers", "1.5"], "--num-layers 1.5 is not a whole number", "--num-layers"),
    (["--num-layers", "0"], "--num-layers 0 must be at least 1", "--num-layers"),
    (["--num-layers", "none"], "--num-layers none is not a whole number", "--num-layers"),
    (["--lr", "fast"], "--lr fast is not a number", "--lr a number above 0 and at most 1e+30"),
    (["--lr", "1e38"], "--lr 1e38 must be above 0 and at most 1e+30", "--lr a number above 0"),
    (["--lr", "nan"], "--lr nan is not finite", "--lr"),
    (["--lr", "-1e-4"], "--lr -1e-4 must be above 0", "--lr"),
    (["--hidden-dropout", "1"], "--hidden-dropout 1 must be at least 0 and below 1", "--hidden-dropout"),
    (["--normalization", "rmsnrm"], "--normalization rmsnrm is not a choice", "RMSNorm? "),
    (["--normalization", "rmsnrm"], "--normalization rmsnrm is not a choice", "LayerNorm or RMSNorm"),
    (
        ["--cp-comm-type", "p2p", "ring"],
        "--cp-comm-type p2p ring has ring, which is no",
        "p2p, all_gather",
    ),
    (["--moe-aux-loss-coeff", "-1"], "--moe-aux-loss-coeff -1 must be at least 0", "numbers at least 0"),
    (["--fp8-recipe", "custom"], "--fp8-recipe custom is not supported", "--fp8-recipe delayed"),
    (["--bf16", "maybe"], "--bf16 maybe is neither true nor false", "--no-bf16"),
    (["--no-bf16", "true"], "--no-bf16 true has a value", "--no-bf16"),
    (["stray", "--bf16"], "stray", "flag before it"),
    (["--num-layers", "4", "5"], "--num-layers 4 5 has 2 values", "--num-layers a whole number"),
    (["--wandb-exp-name", "a", "b"], "--wandb-exp-name a b has 2 values", "quote"),
    (["--encoder-seq-length", "4", "5"], "--encoder-seq-length 4 5 has 2 values", "--seq-length"),
    (["--use-mcore-models", "a", "b"], "--use-mcore-models a b has a value", "alone"),
    (["--data-path", "[]"], "--data-path [] has no value", "--data-path one or more"),
    (["--yaml-cfg"], "--yaml-cfg has no value", "YAML file"),
    (["--config", "a", "b"], "--config has 2 values", "repeat"),
    (["--num-layers", "9" * 5000], "is too large", "--num-layers"),
]


@pytest.mark.parametrize(("argv", "text", "fix"), MISTAKES)
def test_a_mistake_is_named_with_its_remedy(argv, text, fix):
    (problem,) = parse(argv).problems
    assert text in problem.text
    assert fix in problem.fix


def test_all_mistakes_are_collected_at_once():
    argv = ["--num-layer", "3", "--lr", "fast", "--hidden-size", "--normalization", "BatchNorm"]
    assert len(problems(*argv)) == 4


def test_known_returns_none_for_open_and_invalid_values():
    request = parse(["--save", "--num-layers", "x", "--hidden-size", "8"])
    assert [request.known(path) for path in ("checkpoint.save", "model.num_layers", "model.hidden_size")] == [
        None,
        None,
        8,
    ]
    assert request.known("optimizer.lr") is None


def test_the_origin_is_the_flag():
    origins = parse(["--no_bf16", "--lr=1"]).origins
    assert origins["precision.bf16"] == Origin("flag", "--no-bf16")
    assert origins["optimizer.lr"] == Origin("flag", "--lr")
    assert origins["model.num_layers"] == Origin("default")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--vocab-file v --merge-file m", "GPT2BPETokenizer"),
        ("--model-family bert --vocab-file v", "BertWordPieceLowerCase"),
        ("--model-family bert --vocab-file v --tokenizer-type BertWordPieceCase", "BertWordPieceCase"),
        ("--vocab-file v", None),
        ("--model-family vlm --vocab-file v --merge-file m", None),
    ],
)
def test_files_of_a_tokenizer_have_the_type_of_megatron_lms_program(flags, kind):
    request = parse(flags.split())
    assert request.known("tokenizer.tokenizer_type") == kind
    is_derived = str(request.origins["tokenizer.tokenizer_type"]).startswith("derived: Megatron-LM's for")
    assert is_derived == (kind is not None and "--tokenizer-type" not in flags)


def test_flags_are_unique():
    spellings = [setting.flag for setting in settings()]
    spellings += [setting.opposite_flag for setting in settings() if setting.kind is bool]
    assert len(set(spellings)) == len(spellings)


def test_a_default_has_the_type_that_parsing_gives():
    """1000 and 1000.0 would be reported as different."""
    defaults = [(setting, setting.default) for setting in settings() if is_resolved(setting.default)]
    assert [
        setting.path
        for setting, default in defaults
        if default is not None and not setting.is_list and type(default) is not setting.kind
    ] == []


def test_every_field_has_a_help_text():
    texts = field_help()
    assert [setting.path for setting in settings() if not texts.get(setting.path)] == []


def test_help_and_version_print_and_exit(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--num-layers", "x", "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--num-layers INT" in shown
    assert "Transformer layers of the model." in shown
    assert "--no-use-distributed-optimizer" in shown
    assert "--no-bf16" not in shown
    assert "(default: aux_loss)" in shown  # the items of a list, not its Python form
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert capsys.readouterr().out == f"megatrain {__version__}\n"


def test_help_is_quick_and_needs_no_torch():
    program = (
        "import sys; from megatrain.config import parse\n"
        "try: parse(['--help'])\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "--tensor-model-parallel-size" in shown
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1  # About 0.1.
