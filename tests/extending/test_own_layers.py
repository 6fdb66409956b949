"""--spec with parts of the user's own: the short convolution of docs/extending.md, and an MLP whose use each token decides."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from everyday import one_in
from user_files import MODEL, losses, train, write_example

import pretrain
from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.tools.main import main
from megatrain.tools.parity.compare import judge
from megatrain.tools.parity.measure import Job, measure, plan_of
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.launch.user_files import add_user_files
from megatrain.training.parts.trial_parts import try_parts

DEPTHS = f"{Path(__file__).parent / 'mixture_of_depths.py'}:with_depths"
LAYOUTS = ("dp2", "tp2", "tp2 sp", "pp2", "cp2")


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as made:
        yield made


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory):
    return f"{write_example(tmp_path_factory.mktemp('example'), 'my_layers.py')}:with_convolutions"


@pytest.fixture(scope="module")
def tanh(tmp_path_factory):
    return f"{write_example(tmp_path_factory.mktemp('example'), 'my_norm.py')}:with_tanh"


@pytest.mark.parametrize("which", one_in(2, ["convolutions", "depths", "tanh"]))
def test_split_over_ranks_equals_one_process(pool, convolutions, tanh, which):
    """Losses, gradient norms, every gradient and every weight, in fp64."""
    spec = ({"convolutions": convolutions, "depths": DEPTHS, "tanh": tanh}[which],)
    alone = pool.run(1, measure, Job(Layout.of(""), spec=spec))[0]
    own = {
        "convolutions": "short_convolution.kernel",
        "depths": "mlp.depth_router",
        "tanh": "attention.alpha",
    }[which]
    assert any(own in part.name and part.values.any() for part in alone.gradients)
    for words in LAYOUTS:
        job = Job(Layout.of(words), spec=spec)
        if which == "convolutions" and words == "cp2":
            with pytest.raises(ConfigError, match=r"ShortConvolution .* --context-parallel-size 2"):
                plan_of(job, 2)
            with pytest.raises(ConfigError, match=r"ShortConvolution .* --reset-attention-mask"):
                plan_of(Job(Layout.of("dp2 documents"), spec=spec), 2)
            continue
        found = judge(alone, pool.run(2, measure, job))
        assert found.is_good, (words, found.names, found.numbers)


@pytest.mark.nightly
def test_a_checkpoint_is_resharded_and_generates_no_text(tmp_path, convolutions):
    flags = f"--mock-data --spec {convolutions} --save {{0}} --load {{0}} --params-dtype float64"
    whole = losses(tmp_path / "whole", flags.format(tmp_path / "whole"))
    resumed = flags.format(tmp_path / "split")
    train(tmp_path / "split", f"{resumed} --exit-interval 3", exit_code=75)
    rest = losses(tmp_path / "split", f"{resumed} --tensor-model-parallel-size 2 --sequence-parallel", 2)
    assert rest == pytest.approx({key: whole[key] for key in rest}, rel=1e-10)
    assert "train 6" in rest
    command = [sys.executable, "-m", "megatrain.tools.main", "generate", "--load", str(tmp_path / "split")]
    ended = subprocess.run(
        [*command, "--spec", convolutions, "--prompt", "1 2"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "layers with ShortConvolution generate no text" in ended.stderr


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_norm_of_one_s_own_is_in_place_of_the_model_s(tmp_path, tanh, dropout):
    """With dropout, a branch must not add its output to its own input."""
    flags = f"--mock-data --spec {tanh} --hidden-dropout {dropout}"
    text = train(tmp_path / "planned", f"{flags} --dry-run")
    (total,) = re.findall(r"model: ([\d,]+) parameters", text)
    whole = losses(tmp_path / "whole", f"{flags} --save {tmp_path / 'whole'} --params-dtype float64")
    assert f"model: {total} parameters" in train(tmp_path / "built", flags)
    two = f"{flags} --params-dtype float64 --tensor-model-parallel-size 2 --sequence-parallel"
    assert losses(tmp_path / "split", two, 2) == pytest.approx(whole, rel=1e-10)


def test_the_dry_run_counts_every_parameter(tmp_path, convolutions):
    text = train(tmp_path / "run", f"--mock-data --spec {convolutions} --dry-run")
    model, width = 32, 4 * 32
    attention, convolution = 4 * model**2 + 4 * model, 4 * model**2 + 3 * model
    mlp, norms = 2 * model * width + width + model, 2 * (2 * 2 * model) * 2 + 2 * model
    assert f"short_convolution {2 * convolution:,}" in text
    assert f"attention {2 * attention:,}" in text
    (total,) = re.findall(r"model: ([\d,]+) parameters", text)
    assert int(total.replace(",", "")) == 2 * attention + 2 * convolution + 4 * mlp + norms + 101 * model
    assert "2 with ShortConvolution" in text


def test_the_dry_run_names_the_line_that_does_not_fit_the_ranks(tmp_path, convolutions, capsys):
    path = tmp_path / "mine.py"
    text = Path(convolutions.split(":")[0]).read_text()
    path.write_text(text.replace("gates.chunk(3, dim=-1)", "gates.split(32, dim=-1)"))
    flags = f"{MODEL} --mock-data --spec {path}:with_convolutions --dry-run"
    assert pretrain.main(flags.split()) == 0
    assert pretrain.main(f"{flags} --world-size 2 --tensor-model-parallel-size 2".split()) == 2
    error = capsys.readouterr().err
    assert re.search(r"error: --spec: ShortConvolution: ValueError: .*mine.py:\d+\)\n  fix: ", error)
    assert "Traceback" not in error


def test_a_parameter_without_gradient_and_a_name_used_twice_are_named(tmp_path, convolutions, capsys):
    text = Path(convolutions.split(":")[0]).read_text()
    frozen, twice = tmp_path / "frozen.py", tmp_path / "twice.py"
    frozen.write_text(text.replace('weight_of(self, "kernel")', 'weight_of(self, "kernel").detach()'))
    assert main(f"parity --spec {frozen}:with_convolutions --layouts pp2".split()) == 1
    assert "FAIL  decoder.layers.1.short_convolution.kernel has no gradient" in capsys.readouterr().out
    line = 'self.add_weight("kernel", layout, context.ranks.dtype)'
    twice.write_text(text.replace(line, f"{line}; {line.replace('kernel', 'other')}"))
    with pytest.raises(ConfigError, match=r"two parameters have the name .*short_convolution\.kernel"):
        measure(0, 1, Job(Layout.of(""), spec=(f"{twice}:with_convolutions",)))
    other = tmp_path / "other.py"
    other.write_text(text.replace('split="inputs", reads', 'split="none", reads'))
    with pytest.raises(ConfigError, match=r"its module splits it .* by inputs, and linears\(\) by none"):
        measure(0, 1, Job(Layout.of(""), spec=(f"{other}:with_convolutions",)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("chunk(3", "chunk(2", r"ValueError: not enough values to unpack .*mine.py:\d+\)"),
        ("info):", "info, mask):", r"TypeError: .* missing 1 required positional argument: 'mask' \(.*mine.py\)"),
        ('linears["b"]', 'linears["gates"]', r"KeyError: 'gates' \(.*mine.py:\d+\)"),
        ("return residual, self", "return self", "forward returned Tensor, not two tensors"),
        ("return residual, ", "return residual.transpose(0, 1), ", r"returned \[2, 16, 32\] and .* here \[16, 2, 32\]"),
        ("super().__init__()", "super().__init__(); self.scale = torch.nn.Parameter(torch.ones(32))", "parameter scale of ShortConvolutionModule has no layout"),
        ("super().__init__()", "super().__init__(); self.more = torch.nn.Linear(4, 4)", r"parameter more\.weight of .* has no layout"),
        ('weight_of(self, "kernel")', "self.kernel", "parameter kernel does not reach the gradient buffer"),
        ("(residual, delta, info)\n", "(residual, None, info)\n", r"the residual stream differs from residual \+ delta"),
        ("return residual, ", "return residual + delta if delta is not None else residual, ", "the residual stream differs from"),
        ("b * x, weight", "(b * x).flip(0), weight", "output for a token differs from that before a change of later tokens"),
        ("b * x, weight", "(b * x).transpose(0, 1).reshape(b.shape), weight", "a change of (later tokens|other samples)"),
        ("return residual, ", "return residual, torch.rand(()) * ", "its output differs from that of an equal call before"),
    ],
)  # fmt: skip
def test_a_part_that_computes_wrongly_is_found_at_the_start(tmp_path, convolutions, old, new, words):
    text = Path(convolutions.split(":")[0]).read_text()
    start, forward = text.split("    def forward(")
    assert old in text
    where = "    def forward(" + forward
    changed = start + where.replace(old, new, 1) if old in where else start.replace(old, new, 1) + where
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n{changed}")
    request = parse(f"{MODEL} --mock-data --spec {path}:with_convolutions".split())
    plan = resolve(request, add_user_files(request, Facts(vocab_size=101, eod_id=100)))
    with pytest.raises(ConfigError, match=rf"--spec: ShortConvolution[\s\S]*{words}[\s\S]*fix: "):
        try_parts(plan, torch.device("cpu"))


PART = """
import dataclasses
from dataclasses import dataclass
from typing import ClassVar
from megatrain.config.model_spec.part import Part
from megatrain.config.model_spec.linear import Linear, Piece

@dataclass(frozen=True)
class Mine(Part):
    name: ClassVar[str] = "mine"
    role: ClassVar[str] = "mixer"
    module: ClassVar[object] = object
    def linears(self, hidden_size):
        yield Linear(part="mine", pieces=(Piece("a", 6),), inputs=hidden_size, split="outputs")
        yield Linear(part="mine", pieces=(Piece("b", hidden_size),), inputs=7, split="inputs")

class Other: pass
def f(model, layers): return [layer.with_part(Mine()) for layer in layers]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Mine()) for", "Mine) for", "Mine is a class: create a part"),
        ("Mine()) for", "Other()) for", r"AttributeError: 'Other' object has no attribute 'role'"),
        ("class Mine(Part)", "class Mine", "Mine is no part of a layer: derive it from .*Part"),
        ("@dataclass(frozen=True)", "", "Mine must be a frozen dataclass"),
        ('str] = "mixer"', 'str] = "both"', "Mine must be a frozen dataclass with .* `role`"),
        ("module: ClassVar[object] = object", "", "Mine has no class attribute `module`"),
        ('part="mine", pieces=(Piece("a"', 'part="other", pieces=(Piece("a"', "a Linear of part other, not mine"),
        ("yield Linear", "return 1 / 0; yield Linear", r"Mine: ZeroDivisionError: .*layers.py:14"),
        ('"mine"\n', '"mlp"\n', "two parts have the name mlp"),
        ('Piece("a", 6)', 'Piece("a", 9)', "hidden states of width 9, not divisible by --tensor-model-parallel-size 2"),
        ('pieces=(Piece("a", 6),)', "pieces=()", r"yields a Linear without pieces"),
        ('Piece("b", hidden_size)', 'Piece("a", hidden_size)', "yields two of the name mine.a"),
        ("def linears", "def other_weights(self, h): return 1 / 0\n    def linears", "Mine: ZeroDivisionError"),
        ("layer.with_part(Mine())", "dataclasses.replace(layer, norm_position='sandwich')", "norm_position is 'sandwich'"),
        ('split="outputs"', 'split="output"', "the split 'output', not one of"),
        ("(frozen=True)", "()", "Mine must be a frozen dataclass"),
        ("inputs=7", "inputs=9", "mine.b has 9 inputs, not divisible by --tensor-model-parallel-size 2"),
    ],
)  # fmt: skip
def test_a_part_that_cannot_be_used_is_named(tmp_path, old, new, words):
    path = tmp_path / "layers.py"
    assert old in PART
    path.write_text(PART.replace(old, new, 1))
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1"
        " --lr 1e-3 --mock-data --device cpu --tensor-model-parallel-size 2"
    )
    request = parse(f"{flags} --spec {path}:f".split())
    with pytest.raises(ConfigError, match=rf"--spec[\s\S]*{words}"):
        resolve(request, add_user_files(request, Facts(vocab_size=101, eod_id=100, world_size=2)))
