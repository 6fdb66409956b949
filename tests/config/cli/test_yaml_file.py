"""YAML files: values, their line numbers, errors in a file, and a written file that reads back the same."""

import dataclasses

import pytest

from megatrain.config import ConfigError, Origin, parse, to_yaml
from megatrain.config.schema.values import AUTO


@pytest.fixture
def written(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_values_come_with_their_line(written):
    file = written(
        "model:\n  num_layers: 12\n  swiglu: yes\noptimizer:\n  lr: 1e-4\ndata:\n  data_path: [a, b]\n  split: 98,1,1\n"
    )
    request = parse(["--config", file])
    assert request.problems == ()
    config = request.config
    assert (config.model.num_layers, config.model.swiglu, config.optimizer.lr) == (12, True, 1e-4)
    assert (config.data.data_path, config.data.split) == (("a", "b"), "98,1,1")
    assert request.origins["optimizer.lr"] == Origin("yaml", f"{file}:5")


def test_names_stand_in_sections_or_beside_them(written):
    file = written(
        "num-layers: 12\noptimizer: adam\ndata: {split: '98,1,1'}\nlr: 1e-4\nuse_mcore_models: true\n"
    )
    request = parse(["--config", file])
    assert request.problems == ()
    config = request.config
    assert (config.model.num_layers, config.optimizer.optimizer, config.optimizer.lr) == (12, "adam", 1e-4)
    assert config.data.split == "98,1,1"
    assert request.origins["optimizer.lr"] == Origin("yaml", f"{file}:4")


@pytest.mark.parametrize(
    ("text", "flags"), [("num_layer: 4\n", ""), ("model: {num_layr: 4}\n", ""), ("", "--num-layer 4")]
)
def test_a_mistyped_name_has_no_problems_that_follow(plan_of, written, text, flags):
    """The setting that it means is not reported as missing."""
    with pytest.raises(ConfigError) as raised:
        plan_of(f"--config {written(text)} {flags}", without="--num-layers")
    assert len(raised.value.problems) == 1


def test_flags_win_over_later_files_over_earlier_files_over_defaults(written):
    first = written("training:\n  seed: 1\n  eval_iters: 1\n  micro_batch_size: 1\n", "first.yaml")
    second = written("training: {eval_iters: 2, micro_batch_size: 2}\n", "second.yaml")
    request = parse(["--micro-batch-size", "3", "--config", first, "--config", second])
    training = request.config.training
    assert (training.seed, training.eval_iters, training.micro_batch_size) == (1, 2, 3)
    assert training.device is AUTO
    kinds = [
        request.origins[f"training.{name}"].kind
        for name in ("seed", "eval_iters", "micro_batch_size", "device")
    ]
    assert kinds == ["yaml", "yaml", "flag", "default"]


def test_null_undoes_an_earlier_value(written):
    first = written("data: {data_path: [a], split: '9,1'}\ncheckpoint: {save: x}\n", "first.yaml")
    second = written("data: {data_path: null, split: null}\ncheckpoint: {save: null}\n", "second.yaml")
    request = parse(["--config", first, "--config", second])
    assert request.problems == ()
    assert (request.config.data.data_path, request.config.data.split) == ((), AUTO)
    assert request.config.checkpoint.save is None


def test_an_empty_file_and_an_empty_section_say_nothing(written):
    assert parse(["--config", written("")]).problems == ()
    assert parse(["--config", written("model:\n")]).problems == ()


MISTAKES = [
    ("modell:\n  num_layers: 1\n", ":1: there is no setting and no section modell", "model?"),
    ("num_layer: 1\n", ":1: there is no setting and no section num_layer", "num_layers?"),
    (
        "num_layers: 1\nmodel:\n  num_layers: 1\n",
        ":3: num_layers is given twice, first at",
        "one of them",
    ),
    (
        "language_model:\n  num_layers: 1\n",
        ":1: there is no setting and no section language_model",
        "--yaml-cfg",
    ),
    ("model:\n  num_layer: 1\n", ":2: section model has no field num_layer", "num_layers?"),
    ("model:\n  lr: 1\n", ":2: section model has no field lr", "below `optimizer:`"),
    (
        "training:\n  optimizer:\n    lr: 1\n",
        ":2: section training has no field optimizer",
        "begin the line `optimizer:` at the left margin",
    ),
    ("model:\n  num_layers: 1\n  num_layers: 2\n", ":3: num_layers is given twice", "one of them"),
    ("model: {}\nmodel: {}\n", ":2: model is given twice", "one of them"),
    ("model:\n  num_layers: true\n", ":2: num_layers: true is not a whole number", "num-layers"),
    ("model:\n  num_layers: 1.5\n", ":2: num_layers: 1.5 is not a whole number", "num-layers"),
    ("model:\n  num_layers: [1]\n", ":2: num_layers: a list is not one value", "num-layers"),
    ("model:\n  num_layers: {a: 1}\n", ":2: num_layers: a mapping is not one value", "num_layers"),
    ("model:\n  num_layers: null\n", ":2: num_layers: null has no value", "num-layers"),
    ("model:\n  swiglu: 1\n", ":2: swiglu: 1 is neither true nor false", "--swiglu"),
    ("checkpoint:\n  save: true\n", ":2: save: true is true or false", "quote"),
    ("data:\n  data_path: [a, [b]]\n", ":2: data_path: a list", "data_path"),
    ("model: 3\n", ":1: model is a section", "indent"),
    ("- model\n", ":1: expected sections", "model"),
    ("model:\n  num_layers: [1\n", "not valid YAML", "syntax"),
    ("model:\n\tnum_layers: 1\n", ":2: not valid YAML", "syntax"),
    ("? [a]\n: 1\n", ":1: a list or mapping", "name: value"),
    ("training: {product_algorithms: a.json}\n", ":1: product_algorithms was removed", "remove the line"),
    (
        "model: {use_rotary_position_embeddings: true}\n",
        ":1: use_rotary_position_embeddings is an old name",
        "position_embedding_type: rope",
    ),
]


@pytest.mark.parametrize(("written_text", "text", "fix"), MISTAKES)
def test_a_mistake_is_named_with_file_and_line(written, written_text, text, fix):
    file = written(written_text)
    (problem,) = parse(["--config", file]).problems
    assert problem.text.startswith(file)
    assert text in problem.text
    assert fix in problem.fix


def test_a_missing_file_is_a_problem(tmp_path):
    (problem,) = parse(["--config", str(tmp_path / "no.yaml")]).problems
    assert "no.yaml: No such file" in problem.text


def test_a_flag_mends_what_a_file_gets_wrong_but_both_are_told(written):
    request = parse(["--config", written("model:\n  num_layers: x\n"), "--num-layers", "2"])
    assert request.config.model.num_layers == 2
    assert len(request.problems) == 1


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--lr 0.30000000000000004 --adam-eps 1e-300 --weight-decay 123456789012345678",
        "--save null --load ~ --metrics-file 'it''s:#1' --data-cache-path 12",
        "--save true --load 1e5 --metrics-file [a] --data-cache-path {b",
        "--tokenizer-model Grüße/🙂",
        "--split 0.969,.03,1e --eval-interval 5 --exit-duration-in-mins 0.1 --bf16",
    ],
)
def test_what_is_written_reads_back_the_same(plan_of, written, flags):
    request = parse([*flags.split(), "--num-layers", "3"])
    assert request.problems == ()
    again = parse(["--config", written(to_yaml(request.config, request.origins))])
    assert again.problems == ()
    assert again.config == request.config


def test_a_resolved_plan_reads_back_the_same(plan_of, written):
    plan = plan_of("--data-path a:b --tokenizer-type NullTokenizer", without="--mock-data")
    text = to_yaml(plan.config, plan.origins)
    assert "  num_layers: 4  # --num-layers\n" in text
    assert "  kv_channels: 16  # derived: hidden size 64 / 4 heads\n" in text
    again = parse(["--config", written(text)])
    assert again.config == plan.config
    assert dataclasses.asdict(again.config) == dataclasses.asdict(plan.config)


def test_missing_values_are_written_as_comments(written):
    text = to_yaml(parse([]).config)
    assert "  # num_layers: REQUIRED\n" in text
    assert "  kv_channels: auto\n" in text
    assert parse(["--config", written(text)]).config == parse([]).config


def test_a_saved_configuration_may_list_settings_of_earlier_versions(written):
    text = to_yaml(parse([]).config).replace("training:\n", "training:\n  product_algorithms: {}\n")
    assert parse(["--config", written(text.format("null"))]).problems == ()
