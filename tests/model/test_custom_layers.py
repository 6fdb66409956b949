"""--spec: the example of docs/models.md, its notes in a plan, and refused functions."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from megatrain.config import ConfigError, Facts, Plan, StoredRun, parse, resolve
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.user_function import UserFunction
from megatrain.model.gpt import Model
from megatrain.parallel.batch import Batch
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.build import build_model_from_plan
from megatrain.training.engine import Engine
from megatrain.training.evaluation import evaluate
from megatrain.training.launch.user_files import add_user_files, with_own_files

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODEL = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 24 --kv-channels 4 --ffn-hidden-size 96 --normalization"
    " RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
    " --seq-length 24 --micro-batch-size 2 --train-iters 3 --lr 1e-2 --mock-data --vocab-size 101 --device cpu"
)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Write the example of the page to a file."""
    (text,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "def my_spec" in block
    )
    path = tmp_path / "my_layers.py"
    path.write_text(text)
    return path


def plan_of(spec: str, *, stored: StoredRun | None = None, flags: str = "", ranks: int = 1) -> Plan:
    request = parse(f"{MODEL} --spec {spec} {flags}".split())
    facts = add_user_files(request, Facts(vocab_size=101, eod_id=100, checkpoint=stored, world_size=ranks))
    return resolve(request, with_own_files(request, Facts.from_json(facts.to_json())))


EXPERTS = """
import dataclasses
from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec

def experts_after_the_first(model, layers):
    first, *others = layers
    expert = dataclasses.replace(first.mlp, ffn_hidden_size=16)
    experts = ExpertsSpec(router=RouterSpec(num_experts=6, top_k=2), expert=expert, shared=expert)
    return [first, *(layer.with_part(experts) for layer in others)]

def with_biases(model, layers):
    return [one.with_part(dataclasses.replace(one.experts, expert=dataclasses.replace(
        one.experts.expert, has_bias=True))) if one.experts else one
        for one in experts_after_the_first(model, layers)]
"""


WINDOWS = """
import dataclasses

def near(model, layers):
    *others, last = layers
    return [*others, last.with_part(dataclasses.replace(last.mixer, window=8))]
"""


@pytest.mark.parametrize("asked", ["", "--cp-comm-type p2p"])
def test_custom_windows_choose_all_gather_over_a_ring(tmp_path: Path, asked: str) -> None:
    file = tmp_path / "near.py"
    file.write_text(WINDOWS)
    flags = f"{MODEL} --context-parallel-size 2 {asked} --device cuda --bf16 --kv-channels 16"
    known = Facts(vocab_size=101, eod_id=100, world_size=2, device="cuda")
    request = parse(f"{flags} --spec {file}:near".split())
    plan = resolve(request, add_user_files(request, known))
    assert plan.derived.cp_comm_types == ("all_gather",)
    assert resolve(parse(flags.split()), known).derived.cp_comm_types == ((asked or "a2a").split()[-1],)


SCORES = """
import dataclasses

def of_last(layers, **changes):
    *others, last = layers
    return [*others, last.with_part(dataclasses.replace(last.mixer, **changes))]

def plain(model, layers):
    return layers

def capped(model, layers):
    return of_last(layers, softcap=50.0)

def with_sink(model, layers):
    return of_last(layers, sink="zero")

def all_dropped(model, layers):
    return [layer.with_part(dataclasses.replace(layer.mixer, dropout=0.1)) for layer in layers]
"""


@pytest.mark.parametrize(
    ("name", "has_sinks", "kernel"),
    [
        ("plain", False, "cudnn"),
        ("capped", False, "triton"),
        ("with_sink", True, "cudnn"),
        ("all_dropped", False, "triton"),
    ],
)
def test_a_plan_knows_the_needs_of_custom_attention(
    tmp_path: Path, name: str, has_sinks: bool, kernel: str
) -> None:
    file = tmp_path / "scores.py"
    file.write_text(SCORES)
    request = parse(f"{MODEL} --device cuda --bf16 --kv-channels 16 --spec {file}:{name}".split())
    facts = add_user_files(request, Facts(vocab_size=101, eod_id=100, device="cuda"))
    plan = resolve(request, facts)
    mixers = [layer.attention for layer in plan.derived.model_spec.layers if layer.attention]
    assert any(mixer.sink != "none" for mixer in mixers) == has_sinks
    assert plan.derived.attention_backend == kernel


def test_custom_layers_may_have_experts(tmp_path: Path) -> None:
    file = tmp_path / "experts.py"
    file.write_text(EXPERTS)
    six = "--num-experts 6 --moe-layer-freq [0]+[1]*3"
    plan = plan_of(f"{file}:experts_after_the_first", flags=six)
    assert "in 3 layers" in str(plan.derived.model_spec)
    assert "6 experts of 16 and 16 shared, 2 a token" in str(plan.derived.model_spec)
    registry = model_of(plan).registry
    names = {piece.name for entry in registry.entries.values() for piece in entry.layout.pieces}
    assert "decoder.layers.0.mlp.up.weight" in names
    assert {"decoder.layers.3.mlp.experts.5.down.weight", "decoder.layers.3.mlp.shared.up.weight"} <= names
    biased = model_of(plan_of(f"{file}:with_biases", flags=six)).registry
    names = {piece.name for entry in biased.entries.values() for piece in entry.layout.pieces}
    assert {"decoder.layers.3.mlp.experts.5.down.bias", "decoder.layers.3.mlp.experts.0.gate.bias"} <= names
    with pytest.raises(ConfigError, match=r"layer 1 .* 6 experts[\s\S]*fix: use --num-experts 6"):
        plan_of(f"{file}:experts_after_the_first")
    with pytest.raises(ConfigError, match=r"width 16[\s\S]*--expert-tensor"):
        plan_of(f"{file}:experts_after_the_first", flags=f"{six} --expert-tensor-parallel-size 3", ranks=3)
    with pytest.raises(
        ConfigError, match=r"--tensor-model-parallel-size 2 .*experts[\s\S]*fix: add --sequence-parallel"
    ):
        plan_of(f"{file}:experts_after_the_first", flags=f"{six} --tensor-model-parallel-size 2", ranks=2)


def model_of(plan: Plan) -> Model:
    return build_model_from_plan(plan, build_grid(GridShape(), 0), torch.device("cpu"))


def test_the_page_s_example_is_built_and_noted(example: Path) -> None:
    plan = plan_of(f"{example}:my_spec")
    layers = model_of(plan).spec.layers
    assert [layer.norm_position for layer in layers] == ["post", "post", "pre", "pre"]
    assert [layer.mlp.activation_fn.name if layer.mlp and layer.mlp.activation_fn else None for layer in layers] == [
        None, None, "cubed_relu", "cubed_relu",
    ]  # fmt: skip
    (note,) = (note for note in plan.notes if note.startswith("--spec "))
    assert "layers 0 to 1: norm_position post, by the flags pre" in note
    assert (
        "layers 2 to 3: mlp.activation squared_relu, by the flags swiglu, mlp.activation_fn cubed_relu"
        in note
    )
    assert [layer.dense.is_gated for layer in plan.derived.model_spec.layers] == [True, True, False, False]


def test_gradients_are_those_of_the_loss(example: Path) -> None:
    """Compare the gradients of a weight before the activation and of one after it with finite differences of the loss."""
    plan = plan_of(f"{example}:my_spec", flags="--params-dtype float64 --init-method-std 0.3")
    engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cpu"))
    engine.initialize()
    tokens = torch.randint(0, 101, (2, 25), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(2, 24),
        position_ids=torch.arange(24).expand(2, 24),
    )
    engine.accumulate_gradients([batch])
    for name in ("decoder.layers.3.mlp.up.weight", "decoder.layers.2.mlp.down.weight"):
        (entry,) = (e for e in engine.model.registry.entries.values() if e.layout.pieces[0].name == name)
        gradient, losses = entry.module.weight_grads[entry.attribute][1, 2].item(), []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                entry.parameter[1, 2] += step
                loss, count = evaluate(engine, [batch]).tolist()[:2]
                entry.parameter[1, 2] -= step
            losses.append(loss / count)
        assert gradient == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def spec_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "layers.py"
    path.write_text(
        "import dataclasses\nfrom megatrain.config.model_spec.activation import ActivationFunction\n"
        f"def change(layer, **values):\n    return dataclasses.replace(layer, **values)\n{text}\n"
    )
    return f"{path}:f"


@pytest.mark.parametrize(
    "words", ["local", "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec"]
)
def test_plain_gpt_layers_are_those_of_the_flags(words: str) -> None:
    plan = plan_of(words)
    assert plan.config.model.spec == ()
    assert any(f"--spec {words}" in note and "--transformer-impl" in note for note in plan.notes)


def test_a_module_is_named_in_one_word_or_two(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(example.parent)
    one, two = plan_of("my_layers:my_spec"), plan_of("my_layers my_spec")
    assert one.derived == two.derived
    assert one.config.model.spec_digest == plan_of(f"{example}:my_spec").config.model.spec_digest


def test_a_yaml_file_may_hold_both_names_in_one_text() -> None:
    assert (
        layer_function(["my.layers f"])
        == layer_function(["my.layers", "f"])
        == UserFunction("my.layers", "f", "--spec")
    )
    assert layer_function(["my files/a.py:f"]) == UserFunction("my files/a.py", "f", "--spec")


def test_a_changed_file_is_reported(example: Path) -> None:
    first = plan_of(f"{example}:my_spec")
    example.write_text(example.read_text() + "# other\n")
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=2, config=first.config.to_dict())
    with pytest.raises(
        ConfigError, match=r"has changed.* checkpoint is [\s\S]*fix: .*--spec-digest"
    ) as caught:
        plan_of(f"{example}:my_spec", stored=stored, flags="--load c")
    consent = re.search(r"--spec-digest \w+", str(caught.value))
    assert consent is not None
    plan = plan_of(f"{example}:my_spec", stored=stored, flags=f"--load c {consent[0]}")
    assert any(f"--spec-digest {first.config.model.spec_digest} -> " in note for note in plan.notes)
    weights = dataclasses.replace(stored, is_start=True)
    plan_of(f"{example}:my_spec", stored=weights, flags="--load c --finetune")
    digest = first.config.model.spec_digest
    with pytest.raises(ConfigError, match=r"--spec .*has changed[\s\S]*--spec-digest"):
        plan_of(f"{example}:my_spec", flags=f"--spec-digest {digest}")
    of_rank_0 = Facts(digests={"model.spec": str(digest)})
    with pytest.raises(ConfigError, match="fix: let all ranks read the same file"):
        with_own_files(parse(f"{MODEL} --spec {example}:my_spec".split()), of_rank_0)


@pytest.mark.parametrize("is_module", [False, True])
def test_a_changed_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_module: bool) -> None:
    """Its digest is compared first: with --spec-digest, with that of the checkpoint and, on each rank, with that of the plan."""
    package, mark = tmp_path / f"package_{is_module}", tmp_path / "the code ran"
    package.mkdir()
    file, text = package / "layers.py", "def f(model, layers): return layers\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{package.name}.layers:f" if is_module else f"{file}:f"
    first = plan_of(name)
    for module in (package.name, f"{package.name}.layers"):
        sys.modules.pop(module, None)
    (package / "__init__.py").write_text(f"open({str(mark)!r}, 'w').close()\n" if is_module else "")
    file.write_text(f"open({str(mark)!r}, 'w').close()\n{text}")
    importlib.invalidate_caches()
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=2, config=first.config.to_dict())
    with pytest.raises(ConfigError, match="has changed"):
        plan_of(name, stored=stored, flags="--load c")
    with pytest.raises(ConfigError, match="has changed"):
        plan_of(name, flags=f"--spec-digest {first.config.model.spec_digest}")
    of_rank_0 = Facts(digests={"model.spec": str(first.config.model.spec_digest)})
    with pytest.raises(ConfigError, match="this rank's file has digest"):
        with_own_files(parse(f"{MODEL} --spec {name}".split()), of_rank_0)
    assert not mark.exists()
    plan_of(name)
    assert mark.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def g(model, layers): return layers", "has no function f"),
        ("def f(model, layers):\n    return 1 / 0", r"ZeroDivisionError: division by zero \(.*layers.py:6\)"),
        ("import nothing_like_this", r"cannot be imported: ModuleNotFoundError: .* \(.*layers.py:5\)"),
        ("def f(model, layers): return layers[:3]", "returned 3 layers, and --num-layers is 4"),
        ("def f(model, layers): return 7", "returned int, not a sequence of LayerSpec"),
        (("C = ActivationFunction('c', lambda x: x * x, lambda x: x)\n"
         "def f(model, layers): return [x.with_part(change(x.mlp, activation_fn=C)) for x in layers]"),
         "derivative of activation function c does not match"),
    ],
)  # fmt: skip
def test_errors_of_a_function_are_reported(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(spec_file(tmp_path, text))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.py cannot be imported: FileNotFoundError"):
        plan_of(f"{tmp_path}/none.py:f")


def test_sizes_of_custom_layers_must_divide_over_the_ranks(tmp_path: Path) -> None:
    spec = spec_file(
        tmp_path,
        "def f(model, layers): return [x.with_part(change(x.mixer, num_heads=9, num_query_groups=3))"
        ".with_part(change(x.mlp, ffn_hidden_size=97)) for x in layers]",
    )
    request = parse(f"{MODEL} --spec {spec} --tensor-model-parallel-size 2".split())
    with pytest.raises(ConfigError) as found:
        resolve(request, add_user_files(request, Facts(world_size=2, vocab_size=101, eod_id=100)))
    texts = [problem.text for problem in found.value.problems]
    over_ranks = [text for text in texts if "--tensor-model-parallel-size 2" in text]
    assert sum("9 heads" in text for text in over_ranks) == 1
    assert sum("width 97" in text for text in over_ranks) == 1


def test_heads_of_custom_layers_share_whole_groups(tmp_path: Path) -> None:
    """The groups may be those of the flags, and the heads not."""
    spec = spec_file(
        tmp_path, "def f(model, layers): return [x.with_part(change(x.mixer, num_heads=7)) for x in layers]"
    )
    with pytest.raises(
        ConfigError, match=r"layer 0 \(from 0\) has 24 query groups, which do not divide its 7 heads"
    ):
        plan_of(spec)


def test_another_function_of_the_same_file_is_another_model(tmp_path: Path) -> None:
    spec = spec_file(tmp_path, "def f(model, layers): return layers\ndef g(model, layers): return layers")
    first = plan_of(spec)
    stored = StoredRun(path="c", iteration=1, consumed_train_samples=2, config=first.config.to_dict())
    with pytest.raises(ConfigError, match=r"layers.py:g: the checkpoint is of another function, .*:f"):
        plan_of(f"{spec[:-2]}:g", stored=stored, flags="--load c")


def test_an_error_beside_spec_is_the_only_one_on_a_cpu(tmp_path: Path) -> None:
    """The layers are described with the plan of another device where this one's is impossible: its problems are no one's."""
    spec = spec_file(tmp_path, "def f(model, layers): return layers")
    request = parse(f"{MODEL.replace(' --device cpu', '')} --spec {spec} --train-samples 8".split())
    with pytest.raises(ConfigError) as found:
        resolve(request, add_user_files(request, Facts(vocab_size=101, eod_id=100, has_triton=False)))
    (problem,) = found.value.problems
    assert "--train-samples" in problem.text
