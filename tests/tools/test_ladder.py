"""Scaling ladders: the fitted law, the runs that are written, what is refused, and a ladder that is trained."""

from __future__ import annotations

import dataclasses
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from everyday import nightly
from metrics_files import logged_lines

import pretrain
from megatrain.config.errors import ConfigError
from megatrain.tools.ladder import runs
from megatrain.tools.ladder.family import LadderSpec, plan_ladder, script
from megatrain.tools.ladder.law import Law, Point, Runs, fit, student_t95
from megatrain.tools.ladder.plot import Target, ladder_svg, short
from megatrain.tools.ladder.runs import LadderRun, problems
from megatrain.tools.main import main as megatrain
from megatrain.tools.report_data import RunData

HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "a": 0.34, "b": 0.28}
"""Numbers of the paper, eq. 10."""


def loss_of(parameters: float, tokens: float) -> float:
    return (
        HOFFMANN["E"] + HOFFMANN["A"] / parameters ** HOFFMANN["a"] + HOFFMANN["B"] / tokens ** HOFFMANN["b"]
    )


SIZES, RATIOS = (1e7, 3e7, 1e8, 3e8), (5, 10, 20, 40)


def points_of(
    noise: float = 0.0, seed: int = 0, sizes: Sequence[float] = SIZES, ratios: Sequence[int] = RATIOS
) -> list[Point]:
    """Return runs of these sizes and tokens per parameter, whose losses have noise of this relative size."""
    random = np.random.default_rng(seed)
    return [
        Point(
            f"{size:g}-{ratio}",
            int(size),
            int(ratio * size),
            loss_of(size, ratio * size) * float(np.exp(noise * random.standard_normal())),
        )
        for size in sizes
        for ratio in ratios
    ]


def test_a_known_law_is_recovered() -> None:
    law = fit(points_of())
    for name, (value, low, high) in law.coefficients.items():
        assert value == pytest.approx(HOFFMANN[name], rel=1e-3)
        assert (low, high) == pytest.approx((value, value), rel=1e-2)
    assert law.predict(7e9, 140e9)[0] == pytest.approx(loss_of(7e9, 140e9), rel=1e-5)


LADDERS = {
    "6 runs": (SIZES[:3], (5, 20), 2e-3, (1e9, 20e9)),
    "9 runs, a near target": (SIZES[:3], RATIOS[:3], 1e-3, (2e8, 4e9)),
    "12 runs": (SIZES, RATIOS[:3], 2e-3, (7e9, 140e9)),
    "12 noisy runs": (SIZES, RATIOS[:3], 1e-2, (7e9, 140e9)),
    "16 runs": (SIZES, RATIOS, 2e-3, (7e9, 140e9)),
}


@pytest.mark.parametrize(
    ("name", "num_ladders", "tolerance"),
    [("12 runs", 40, 10), *(nightly(name, 400, 4) for name in LADDERS)],
)
def test_a_90_percent_interval_has_the_true_loss_of_nine_in_ten_ladders(
    name: str, num_ladders: int, tolerance: float
) -> None:
    """The tolerance is more than twice the standard error of the share."""
    sizes, ratios, noise, target = LADDERS[name]
    covered = 0
    for seed in range(num_ladders):
        loss, low, high = fit(points_of(noise, seed, sizes, ratios)).predict(*target)
        assert low < loss < high
        covered += low <= loss_of(*target) <= high
    assert 100 * covered / num_ladders == pytest.approx(90, abs=tolerance)


def test_intervals_of_the_numbers_have_them_in_most_ladders() -> None:
    covered = dict.fromkeys(HOFFMANN, 0)
    for seed in range(8):
        for name, (value, low, high) in fit(points_of(2e-3, seed, SIZES, RATIOS[:3])).coefficients.items():
            assert low < value < high
            covered[name] += low <= HOFFMANN[name] <= high
    assert min(covered.values()) >= 5, covered


def test_quantiles_of_t_are_those_of_tables() -> None:
    """Those of 1, 2, 10, 11, 19 and 100 degrees of freedom."""
    found = [student_t95(freedom) for freedom in (1, 2, 10, 11, 19, 100)]
    assert found == pytest.approx([6.3138, 2.9200, 1.8125, 1.7959, 1.7291, 1.6602], abs=1e-3)


def test_one_bad_run_does_not_bend_the_law() -> None:
    """As the Huber loss is linear in large residuals."""
    points = points_of(noise=1e-4)
    points[5] = dataclasses.replace(points[5], loss=1.1 * points[5].loss)
    assert fit(points).predict(7e9, 140e9)[0] == pytest.approx(loss_of(7e9, 140e9), rel=5e-3)


def test_the_best_size_has_the_least_loss_for_its_flops() -> None:
    law, flops = fit(points_of()), 6 * 7e9 * 140e9
    size, tokens = law.best_size(flops)
    assert 6 * size * tokens == pytest.approx(flops)
    sizes = np.geomspace(size / 2, 2 * size, 201)
    losses = [loss_of(one, flops / 6 / one) for one in sizes]
    assert sizes[int(np.argmin(losses))] == pytest.approx(size, rel=2e-2)


def test_the_plot_is_a_drawing_of_all_points() -> None:
    points = points_of()
    law = fit(points)
    target = Target(7e9, 140e9, *law.predict(7e9, 140e9))
    root = ET.fromstring(ladder_svg(points, law, target, "<losses>"))
    name = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{name}circle")
    assert len(circles) == len(points) + 4, "and the legend's"
    assert len(root.findall(f"{name}polyline")) == 4
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for circle in circles:
        assert 0 < float(circle.get("cx", "")) < width
        assert 0 < float(circle.get("cy", "")) < height
    assert ET.fromstring(ladder_svg(points[:1], None, None, "one")) is not None
    assert [short(one) for one in (6.74e9, 1.5e12, 83e6, 4032, 12)] == ["6.74B", "1.5T", "83M", "4.03K", "12"]


TARGET = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    " --ffn-hidden-size 160 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0 --attention-dropout 0 --mock-data --seq-length 16 --tokenizer-type NullTokenizer --vocab-size 60"
    " --micro-batch-size 4 --global-batch-size 8 --train-iters 1000 --lr-warmup-iters 100 --lr-decay-style WSD"
    " --lr-wsd-decay-iters 200 --eval-interval 100 --eval-iters 1 --lr 1e-2 --device cpu --save elsewhere"
)


def spec_of(folder: Path, **changed: Any) -> LadderSpec:
    values: dict[str, Any] = {
        "folder": folder, "widths": (16, 32), "tokens_per_parameter": (1.0, 2.0), "depth": None, "batch": 4, "ranks": 1,
    }  # fmt: skip
    return LadderSpec(**(values | changed))


def test_runs_are_smaller_models_of_the_same_shape(tmp_path: Path) -> None:
    ladder = plan_ladder(spec_of(tmp_path), TARGET.split())
    small, _, large, last = ladder.rungs
    assert [rung.name for rung in ladder.rungs] == ["w16-l1-t1", "w16-l1-t2", "w32-l2-t1", "w32-l2-t2"]
    shape = (
        "model.hidden_size",
        "model.num_layers",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.kv_channels",
    )
    assert [small.values[path] for path in shape] == [16, 1, 2, 1, 8]
    assert [large.values[path] for path in shape] == [32, 2, 4, 2, 8]
    assert large.values["model.ffn_hidden_size"] == 80
    # tied embeddings of 60 tokens; q, k, v, projection; three matrices and two norms a layer; a final norm
    assert large.parameters == 60 * 32 + 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 80 + 2 * 32) + 32
    assert last.iterations == -(-2 * last.parameters // (4 * 16))
    assert last.tokens == 64 * last.iterations
    config = yaml.safe_load(last.yaml)
    assert config["training"]["train_iters"] == config["training"]["eval_interval"] == last.iterations
    assert config["schedule"]["lr_warmup_fraction"] == 0.1
    assert config["schedule"]["lr_wsd_decay_iters"] == round(0.2 * last.iterations)
    assert config["checkpoint"] == {"save": str(tmp_path / last.name), "load": str(tmp_path / last.name)}
    assert (ladder.parameters > large.parameters, ladder.tokens) == (True, 1000 * 8 * 16)
    assert any("--use-mup" in note for note in ladder.notes())
    assert not list(tmp_path.iterdir()), "nothing is written before all runs are valid"


def test_mup_has_one_rate_and_one_base(tmp_path: Path) -> None:
    flags = [*TARGET.split(), "--use-mup", "--untie-embeddings-and-output-weights"]
    ladder = plan_ladder(spec_of(tmp_path), flags)
    assert {rung.values["model.mup_base_hidden_size"] for rung in ladder.rungs} == {16}
    assert {rung.values["optimizer.lr"] for rung in ladder.rungs} == {0.01}
    assert {rung.values["model.num_layers"] for rung in ladder.rungs} == {4}, "muP is about widths"
    assert not any("--use-mup" in note for note in ladder.notes())
    given = plan_ladder(spec_of(tmp_path), [*flags, "--mup-base-hidden-size", "32"])
    assert {rung.values["model.mup_base_hidden_size"] for rung in given.rungs} == {32}


@pytest.mark.parametrize(
    ("changed", "flags", "words", "fix"),
    [
        ({"widths": (20,)}, "", "--widths 20", "multiples of 8"),
        ({"batch": 3}, "", "--global-batch-size 3", "--global-batch-size 4"),
        ({}, "--seq-length-schedule 0:8", "--seq-length-schedule does not scale", "remove"),
    ],
)
def test_a_ladder_that_cannot_run_is_refused(
    tmp_path: Path, changed: dict[str, Any], flags: str, words: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_ladder(spec_of(tmp_path, **changed), [*TARGET.split(), *flags.split()])
    (problem,) = caught.value.problems
    assert words in problem.text
    assert fix in problem.fix


def test_the_script_runs_all_runs_some_or_one_of_an_array(tmp_path: Path) -> None:
    ladder = plan_ladder(spec_of(tmp_path / "a b", ranks=2, batch=8), TARGET.split())
    text = script(ladder, spec_of(tmp_path / "a b", ranks=2, batch=8))
    assert "torchrun --standalone --nproc-per-node 2 pretrain.py --config" in text
    assert "--array=0-3" in text
    file = tmp_path / "run.sh"
    file.write_text(text.replace("torchrun --standalone --nproc-per-node 2 pretrain.py", "printf '%s|'"))

    def started(*words: str, **environment: str) -> list[str]:
        ended = subprocess.run(
            ["bash", str(file), *words], env=environment, check=True, capture_output=True, text=True
        )
        return [Path(one).stem for one in ended.stdout.split("|") if one.endswith(".yaml")]

    names = [rung.name for rung in ladder.rungs]
    assert started() == names
    assert started("3", "0") == [names[3], names[0]]
    assert started(SLURM_ARRAY_TASK_ID="2") == [names[2]]


def run_of(name: str, parameters: int = 100, **changed: Any) -> LadderRun:
    summary = {"iterations": 5, "tokens": 1000, "loss": 2.0, "is_running": False} | changed.pop("summary", {})
    values: dict[str, Any] = {
        "name": name, "folder": f"runs/{name}", "x": {}, "curves": {}, "means": None, "summary": summary,
        "validations": {"valid": [(5, 2.1)]}, "settings": {"training.train_iters": 5},
    }  # fmt: skip
    identity = {"the data": "d", "the tokenizer": "t"} | changed.pop("identity", {})
    return LadderRun(RunData(**(values | changed)), parameters, identity)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"summary": {"iterations": 4}}, "has not ended: it is at iteration 4 of 5"),
        ({"summary": {"is_running": True}}, "is running, at iteration 5"),
        ({"settings": {}}, "of an unknown number"),
        ({"validations": {"valid": [(4, 2.1)]}}, "has not ended"),
        ({"validations": {"valid": [(5, None)]}}, "no finite loss"),
        ({"validations": {}, "summary": {"loss": None}}, "no finite loss"),
        ({"identity": {"the tokenizer": "u"}}, "differ in the tokenizer: their losses do not compare"),
        ({"identity": {"the data": "e"}}, "differ in the data"),
    ],
)
def test_runs_that_would_mislead_are_refused(changed: dict[str, Any], words: str) -> None:
    found = list(problems([run_of("a"), run_of("b", **changed)], fits=False))
    assert [words in problem.text for problem in found] == [True]
    assert not list(problems([run_of("a"), run_of("c")], fits=False))


def test_a_law_needs_sizes_and_token_counts() -> None:
    grid = [(size, tokens) for size in (100, 200, 400) for tokens in (1000, 2000, 4000)]
    found = {
        name: [run_of(str(pair), pair[0], summary={"tokens": pair[1]}) for pair in pairs]
        for name, pairs in {
            "all": grid, "five": grid[:5], "two sizes": [one for one in grid if one[0] < 400] * 2,
            "one ratio": [(100 + k, 1000 + k) for k in range(9)],
        }.items()
    }  # fmt: skip
    counts = {name: len(list(problems(pairs, fits=True))) for name, pairs in found.items()}
    assert counts == {"all": 0, "five": 1, "two sizes": 1, "one ratio": 1}
    assert run_of("a").loss == 2.1, "that of the last evaluation"
    assert run_of("a", validations={}).loss == 2.0


@pytest.mark.nightly
def test_a_real_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ladder"
    words = f"ladder write --folder {folder} --widths 8 16 24 --tokens-per-parameter 0.5 --batch 4 {TARGET}".split()
    assert megatrain(words) == 0
    files = sorted(folder.glob("*.yaml"))
    assert [file.stem for file in files] == ["w16-l1-t0.5", "w24-l2-t0.5", "w8-l1-t0.5"]
    for file in files[1:]:
        assert pretrain.main(["--config", str(file)]) == 0
    stopped = ["--config", str(files[0]), "--exit-interval", "3"]
    assert pretrain.main(stopped) == 75
    names = [str(folder / file.stem) for file in files]
    capsys.readouterr()
    assert megatrain(["ladder", "compare", *names]) == 2
    assert "w16-l1-t0.5 has not ended: it is at iteration 3 of" in capsys.readouterr().err
    assert pretrain.main(stopped[:2]) == 0
    capsys.readouterr()
    plot = tmp_path / "plots" / "ladder.svg"
    assert megatrain(["ladder", "compare", *names, "--output", str(plot)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    planned = {file.stem: file.read_text().splitlines()[0] for file in files}
    for name, parameters, tokens, _, loss in rows[1:4]:
        assert planned[name] == f"# {parameters} parameters, {tokens} tokens"
        losses = [line["loss"] for line in logged_lines(folder / name) if line.get("validation") == "valid"]
        assert float(loss) == pytest.approx(losses[-1], abs=1e-4)
    ET.parse(plot)
    assert megatrain(["ladder", "fit", *names]) == 2
    assert "3 runs of 3 sizes and 3 token counts do not determine" in capsys.readouterr().err

    monkeypatch.setattr(runs, "MIN_RUNS", 3)
    monkeypatch.setattr("megatrain.tools.ladder.cli.fit_law", lambda points: fit([*points, *points_of()]))
    assert (
        megatrain(
            [
                "ladder",
                "fit",
                *names,
                "--target-parameters",
                "1e6",
                "--target-tokens",
                "2e7",
                "--output",
                str(plot),
            ]
        )
        == 0
    )
    assert "predicted loss of 1M parameters on 20M tokens:" in capsys.readouterr().out
    assert megatrain(["ladder", "fit", *names, "--target-tokens", "2e7"]) == 2


def test_a_law_is_the_formula() -> None:
    numbers = np.array([*np.log([2.0, 3.0, 4.0]), 0.5, 0.25])
    law = Law(numbers, np.zeros(2), Runs(np.zeros((2, 6)), np.zeros(6)))
    assert law.loss(16.0, 81.0) == pytest.approx(2 + 3 / 4 + 4 / 3)
