"""Megatron-LM's YAML files stand for flags: names of arguments, of `TransformerConfig`, and the MODEL_ARGS of its tests."""

import pytest

from megatrain.config import Origin, parse

ARGUMENTS = """\
language_model:
  num_layers: 24
  num_query_groups: 4
  ffn_hidden_size: null
  layernorm_epsilon: 1.e-5
  layernorm_zero_centered_gamma: True
  add_bias_linear: False
  gated_linear_unit: False
  activation_func: swiglu
  num_moe_experts: 8
  apply_rope_fusion: False
  gradient_accumulation_fusion: True
model_parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: True
  barrier_with_L1_time: True
  bf16: True
swiglu: False
group_query_attention: False
micro_batch_size: 2
rampup_batch_size: [32, 32, 65324160]
use_distributed_optimizer: False
use_legacy_models: False
encoder_seq_length: 4096
data_path: 0.3 /data/a 0.7 /data/b
split: '99,1,0'
save: ${ROOT}/checkpoints
wandb_exp_name: first run
"""

TEST_CASE = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 12
  --bf16: true
  --swiglu: false
  --use_mcore_models: true
  --recompute-modules: [mlp moe_act]
  --moe-layer-freq: ([0]*3+[1]*9)
  --step-batch-size-schedule: 0:384 200B:768
  --data-path: ${DATA_PATH}/text
  --lr: null
TEST_TYPE: regular
"""


@pytest.fixture
def read(tmp_path):
    """Return the file's path and the request with these contents, and flags after it."""

    def build(text, *flags):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return str(file), parse(["--yaml-cfg", str(file), *flags])

    return build


def test_names_of_arguments_and_of_the_transformer_config_set_values(read):
    file, request = read(ARGUMENTS)
    assert request.problems == ()
    expected = {
        "model.num_layers": 24,
        "model.group_query_attention": True,
        "model.num_query_groups": 4,
        "model.norm_epsilon": 1e-5,
        "model.apply_layernorm_1p": True,
        "model.disable_bias_linear": True,
        "model.swiglu": True,
        "experts.num_experts": 8,
        "parallel.tensor_model_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.use_distributed_optimizer": False,
        "precision.bf16": True,
        "training.micro_batch_size": 2,
        "training.rampup_batch_size": ("32", "32", "65324160"),
        "data.seq_length": 4096,
        "data.data_path": ("0.3", "/data/a", "0.7", "/data/b"),
        "data.split": "99,1,0",
        "checkpoint.save": "${ROOT}/checkpoints",
        "logging.wandb_exp_name": "first run",
    }
    assert {path: request.config.get(path) for path in expected} == expected
    assert request.origins["model.norm_epsilon"] == Origin("yaml", f"{file}:5")
    assert request.origins["model.ffn_hidden_size"] == Origin("default")
    notes = "\n".join(request.notes)
    assert f"{file}:11: apply_rope_fusion: False is ignored: " in notes
    assert f"{file}: barrier_with_L1_time: ignored" in notes
    assert f"{file}:24: encoder_seq_length is --seq-length" in notes
    assert "gradient_accumulation_fusion" not in notes
    assert "use_legacy_models" not in notes


def test_the_arguments_of_a_functional_test_set_values(read):
    file, request = read(TEST_CASE)
    assert request.problems == ()
    config = request.config
    assert (config.model.num_layers, config.precision.bf16, config.model.swiglu) == (12, True, False)
    assert config.training.recompute_modules == ("mlp", "moe_act")
    assert config.experts.moe_layer_freq == "([0]*3+[1]*9)"
    assert config.training.step_batch_size_schedule == "0:384 200B:768"
    assert config.data.data_path == ("${DATA_PATH}/text",)
    assert request.origins["optimizer.lr"] == Origin("default")
    assert any(note.startswith(f"{file}:7: --use_mcore_models: true is ignored: ") for note in request.notes)
    assert f"{file}: ENV_VARS, TEST_TYPE are ignored: only MODEL_ARGS are arguments" in request.notes


@pytest.mark.parametrize(
    ("function", "expected"),
    [("swiglu", (True, False)), ("squaredrelu", (False, True)), ("gelu", (False, False))],
)
def test_the_activation_of_the_section_counts(read, function, expected):
    _, request = read(f"swiglu: True\nlanguage_model:\n  activation_func: {function}\n")
    model = request.config.model
    assert (model.swiglu, model.squared_relu) == expected
    assert model.no_bias_gelu_fusion is (function == "gelu")


def test_flags_override_the_file_with_a_note(read):
    _, request = read("lr: 1\nbf16: true\n", "--lr", "2", "--seed", "3")
    assert request.config.optimizer.lr == 2
    (note,) = request.notes
    assert note.startswith("--lr override")
    assert "--seed" not in note


MISTAKES = [
    ("lr: fast\n", ":1: lr: fast is not a number", "--lr"),
    ("layernorm_epsilon: big\n", ":1: layernorm_epsilon: big is not a number", "--norm-epsilon"),
    ("num_layer: 2\n", ":1: num_layer is not an argument", "num_layers?"),
    ("use_legacy_modles: false\n", ":1: use_legacy_modles is not an argument", "use_legacy_models?"),
    ("MODEL_ARGS:\n  --num-layer: 2\n", ":2: --num-layer is not an argument", "--num-layers?"),
    ("gdp_num_householder: 2\n", ":1: gdp_num_householder: 2: ", "remove"),
    ("language_model:\n  activation_func: relu6\n", ":2: activation_func: relu6", "swiglu"),
    ("language_model:\n  gated_linear_unit: true\n", ":2: gated_linear_unit is not an argument", ""),
    ("model:\n  num_layers: 2\n", ":1: model is a section of --config files", "--config FILE"),
    ("other:\n  num_layers: 2\n", ":1: other is not a section", "language_model"),
    ("data_path: [a, [b]]\n", ":1: data_path has other entries", "[a, b]"),
    ("? [a]\n: 1\n", ":1: a list or mapping is not a name", "name: value"),
    ("- a\n", "expected names", "num_layers"),
    ("lr: [1\n", "not valid YAML", "syntax"),
]


@pytest.mark.parametrize(("text", "problem", "fix"), MISTAKES)
def test_a_mistake_is_named_with_file_and_line(read, text, problem, fix):
    file, request = read(text)
    (found,) = request.problems
    assert found.text.startswith(file)
    assert problem in found.text
    assert fix in found.fix


def test_an_empty_file_says_nothing(read):
    _, request = read("")
    assert (request.problems, request.notes) == ((), ())


def test_a_missing_file_hides_what_depends_on_it(tmp_path):
    request = parse(["--yaml-cfg", str(tmp_path / "no.yaml")])
    assert "no.yaml: No such file" in request.problems[0].text
    assert not request.is_complete
