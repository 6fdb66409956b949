"""Metrics of routers: figures of steps, experts without tokens, biases, lines of the log."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatrain.config.model_spec.experts import RouterSpec
from megatrain.model.experts.biases import ExpertBiases
from megatrain.model.experts.router import ROUTER_METRICS
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.training.logging.metrics import router_line, router_values
from megatrain.training.routers import STARVED_ITERATIONS, RouterReport, Routers

CPU = torch.device("cpu")
SPECS = {
    1: RouterSpec(
        num_experts=4, top_k=2, losses=(("aux_loss", 0.1),), z_loss_coeff=0.1,
        score_function="sigmoid", has_expert_bias=True, bias_update_rate=0.5,
    ),
    3: RouterSpec(num_experts=3, top_k=1, losses=(("aux_loss", 0.1), ("seq_aux_loss", 0.0))),
}  # fmt: skip
GOOD = torch.tensor(True)


def routers_of(specs: dict[int, RouterSpec]) -> Routers:
    grid = build_grid(GridShape(), 0)
    model = SimpleNamespace(
        spec=SimpleNamespace(routers=specs, num_trained_indexers=0),
        expert_biases=ExpertBiases(specs, map(str, specs), dtype=torch.float32, device=CPU),
        tp=TensorParallel(grid.tp, grid.kv, sequence_parallel=False),
        cp=ContextParallel(RankGroup("cp", (0,), 0)),
    )
    return Routers(model, grid, CPU)  # type: ignore[arg-type]


def metrics_row(loads: list[float], **sums: float) -> torch.Tensor:
    return torch.tensor([*(sums.get(name, 0.0) for name in ROUTER_METRICS), *loads], dtype=torch.float64)


def step(routers: Routers, infos: list[PassInfo], good: torch.Tensor = GOOD) -> RouterReport:
    routers.collect(infos)
    metrics = routers.finish_step(good)
    assert metrics is not None
    return routers.report(metrics)


def passes(first: list[float], second: list[float]) -> list[PassInfo]:
    """Two micro-batches, with the loads of layer 1 in both."""
    ten = {"entropy": 10.0, "aux_loss": 1.0, "z_loss": 4.0}
    rest = {"entropy": 5.0, "dropped": 2.0, "aux_loss": 3.0}
    one = PassInfo(router_metrics={1: metrics_row(first, **ten), 3: metrics_row([6, 3, 1], **rest)})
    other = PassInfo(router_metrics={1: metrics_row(second, **ten), 3: metrics_row([0, 7, 3], **rest)})
    return [one, other]


def test_figures_are_of_the_whole_step() -> None:
    report = step(routers_of(SPECS), passes([8, 6, 4, 2], [8, 0, 6, 6]))
    assert report.losses == pytest.approx({"z_loss": 2.0, "load_balancing_loss": 2.0})
    first, second = report.layers
    assert (first.layer, second.layer) == (1, 3)
    assert (first.max_load, first.dropped, first.entropy) == pytest.approx((16 / 10, 0, 20 / 20))
    assert (second.max_load, second.dropped, second.entropy) == pytest.approx((30 / 20, 4 / 20, 10 / 20))
    assert not report.starved


def test_biases_follow_the_loads_of_the_step() -> None:
    routers = routers_of(SPECS)
    step(routers, passes([9, 1, 5, 5], [9, 1, 5, 5]))
    assert routers.biases.values.tolist() == [[-0.5, 0.5, 0, 0], [0, 0, 0, 0]]
    step(routers, passes([9, 1, 5, 5], [9, 1, 5, 5]), ~GOOD)
    assert routers.biases.values.tolist() == [[-0.5, 0.5, 0, 0], [0, 0, 0, 0]]


def test_biases_follow_loads_without_dropped_assignments_where_there_is_a_capacity() -> None:
    biased = SPECS[1]
    routers = routers_of({1: biased, 3: dataclasses.replace(biased, capacity_factor=0.9)})
    dropped = metrics_row([9, 1, 5, 5, 4, 1, 3, 2])  # loads, then loads without dropped assignments
    step(routers, [PassInfo(router_metrics={1: metrics_row([9, 1, 5, 5]), 3: dropped})])
    assert routers.biases.values.tolist() == [[-0.5, 0.5, 0, 0], [-0.5, 0.5, -0.5, 0.5]]


def test_starved_experts_are_named_when_they_are_and_when_the_time_has_doubled() -> None:
    routers = routers_of(SPECS)
    sentences = {}
    for iteration in range(1, 4 * STARVED_ITERATIONS + 1):
        report = step(routers, passes([20, 0, 0, 0], [0, 20, 0, 0]))
        if report.starved:
            sentences[iteration] = report.starved
    assert list(sentences) == [STARVED_ITERATIONS * times for times in (1, 2, 4)]
    (sentence,) = sentences[STARVED_ITERATIONS]
    assert sentence.startswith("expert 2 (and 1 other) of layer 1 has had no token for 20 iterations")


def test_a_token_resets_the_count_of_an_expert() -> None:
    routers = routers_of(SPECS)
    for loads in [[20.0, 10, 10, 0]] * (STARVED_ITERATIONS - 1) + [[20.0, 10, 5, 5]]:
        assert not step(routers, passes(loads, loads)).starved
    hungry = [[20.0, 10, 10, 0]] * STARVED_ITERATIONS
    assert [bool(step(routers, passes(loads, loads)).starved) for loads in hungry].count(True) == 1


def test_a_model_without_routers_has_no_metrics() -> None:
    routers = routers_of({})
    routers.collect([PassInfo()])
    assert routers.finish_step(GOOD) is None
    assert not routers.have_losses


def test_the_line_of_the_log_names_the_layers() -> None:
    values = router_values(step(routers_of(SPECS), passes([8, 6, 4, 2], [8, 0, 6, 6])))
    assert values is not None
    assert router_line(values) == (
        " experts | max load: 1.60 x mean (layer 1) | dropped assignments: 10.00 %"
        " | router entropy: 0.500 (layer 3) to 1.000 |"
    )
