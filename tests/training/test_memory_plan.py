"""The planned memory is that of a real step: storage for storage on a CPU, and by hand for a model that is small enough."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_broken_command_lines import command_line

from megatrain.config import Plan, parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.parallel import collectives
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.schedule import one_forward_one_backward
from megatrain.parallel.pipeline.simulator import simulate
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.measure import tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import OPTIONS, Layout
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.dry_run import examine
from megatrain.training.planning.memory_plan import (
    CUBLAS_BYTES,
    RecordedStep,
    StageMemory,
    allocator_bytes,
    device_ledger,
    planned_memory,
    record_step,
)
from megatrain.training.planning.meta_step import StorageLedger, meta_device_as

CPU, META = torch.device("cpu"), torch.device("meta")


def followed(plan: Plan, grid: RankGrid, device: torch.device, num_microbatches: int = 2) -> RecordedStep:
    """A step on a CPU, with memory or without."""
    if device == CPU:
        ledger = device_ledger(as_cuda=False)
        return record_step(plan, grid, CPU, num_microbatches=num_microbatches, ledger=ledger)
    with meta_device_as(as_cuda=False) as operations:
        ledger = device_ledger(as_cuda=False, run=operations.run)
        return record_step(plan, grid, META, num_microbatches=num_microbatches, ledger=ledger)


OF_EXPERTS = {"recomputemoe", "recomputeshared"}
MADE = [
    *(
        f"{recompute} {model} {'documents' if model == 'gemma2' else ''}"
        for model in sorted(MODELS)
        for recompute in OPTIONS["recomputation"]
        if recompute not in OF_EXPERTS
    ),
    *(
        f"{recompute} {experts}"
        for experts in ("mixtral", "deepseek")
        for recompute in OPTIONS["recomputation"]
        if experts == "deepseek" or recompute != "recomputeshared"
    ),
]


@pytest.mark.parametrize("words", MADE)
def test_a_step_without_memory_makes_the_storages_of_a_real_one(words: str) -> None:
    layout = Layout.of(words)
    plan, grid = tiny_plan(layout, 1), build_grid(GridShape(), 0)
    real, planned = followed(plan, grid, CPU), followed(plan, grid, META)
    assert planned.by_class == real.by_class
    assert planned.memory().peak_at == real.memory().peak_at


class NoWire:
    """Stands for torch.distributed: collectives of tensors that have memory, without other ranks. All that arrives is 0.

    With gloo, threads of its own hold what is on its way a little longer than those who wait for it.
    """

    def all_reduce(self, x: torch.Tensor, **_: Any) -> Transfer:
        return Transfer(None, x)

    def all_gather_into_tensor(self, out: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        out.zero_()
        return Transfer(None, out, x)

    reduce_scatter_tensor = all_to_all_single = all_gather_into_tensor

    def isend(self, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        return Transfer(None, x)

    def irecv(self, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        x.zero_()
        return Transfer(None, x)

    def P2POp(self, how: Callable[..., Transfer], x: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # noqa: N802
        return how, x

    def batch_isend_irecv(self, both: list[tuple[Any, ...]]) -> list[Transfer]:
        return [how(x) for how, x in both]


@pytest.mark.parametrize(
    "text",
    [
        "tp2 sp tied",
        "tp4 groups1 olmo2",
        "dp4 zero1 overlap",
        "dp4 zero1 nooverlap",
        "tp2 dp2 zero3",
        "dp4 zero2 overlap",
        "pp4 batch8",
        "tp2 sp dp2 pp2 zero1 gpt2",
        "cp2",
        "cp4 allgather documents",
        "tp2 sp cp2 heads gpt2",
    ],
)
def test_each_rank_is_planned_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(text)
    plan = tiny_plan(layout, layout.world_size)
    count = plan.derived.num_microbatches
    planned = [followed(plan, grid, META, count).by_class for grid in first_and_last(plan)]
    monkeypatch.setattr(collectives, "dist", NoWire())
    assert planned == [followed(plan, grid, CPU, count).by_class for grid in first_and_last(plan)]
    assert all(sum(by_class.values()) > 0 for by_class in planned)


def first_and_last(plan: Plan) -> Iterator[RankGrid]:
    for rank in (0, plan.derived.world_size - 1):
        yield build_grid(grid_shape(plan), rank)


OFFLOAD: dict[str, str | None] = {"--bf16": "", "--optimizer-cpu-offload": ""}


@pytest.mark.parametrize("flags", [{"--bf16": ""}, {"--fp16": ""}, {"--optimizer": "sgd"}, OFFLOAD])
def test_other_dtypes_and_optimizers_too(flags: dict[str, str | None]) -> None:
    plan = examine(parse(command_line({**flags, "--dry-run": ""})), LaunchEnvironment()).plan
    grid = build_grid(GridShape(), 0)
    assert followed(plan, grid, META).by_class == followed(plan, grid, CPU).by_class


def test_state_on_the_host_takes_no_memory_of_the_device() -> None:
    """Master weights and two moments in fp32, and room for two buckets' gradients in fp32 and weights in bf16."""
    here, away = planned({"--bf16": ""}), planned(OFFLOAD)
    state = here.held.master_weights + here.held.optimizer_state
    assert (away.held.master_weights, away.held.optimizer_state) == (0, 0)
    assert here.total - away.total == state
    assert here.held.on_host == 0
    travelling = away.held.on_host - state
    largest = max(shard.numel for shard in engine_of(OFFLOAD).buffers.shards)
    assert travelling == 2 * largest * (4 + 2)
    half = planned({**OFFLOAD, "--optimizer-offload-fraction": "0.5"}).held
    assert half.master_weights + half.optimizer_state + half.on_host - travelling == state
    assert 0 < half.master_weights + half.optimizer_state <= state / 2


def engine_of(changed: dict[str, str | None]) -> Engine:
    plan = examine(parse(command_line({**changed, "--dry-run": ""})), LaunchEnvironment()).plan
    return Engine(plan, build_grid(GridShape(), 0), META)


def planned(changed: dict[str, str | None]) -> StageMemory:
    return examine(parse(command_line({**changed, "--dry-run": ""})), LaunchEnvironment()).memory[0]


LLAMA = {
    "--num-layers": "1", "--hidden-size": "512", "--ffn-hidden-size": "1024", "--num-attention-heads": "4",
    "--seq-length": "1024", "--micro-batch-size": "2", "--global-batch-size": "2", "--vocab-size": "1024",
    "--normalization": "RMSNorm", "--swiglu": "", "--position-embedding-type": "rope", "--disable-bias-linear": "",
    "--untie-embeddings-and-output-weights": "", "--device": "cpu",
}  # fmt: skip


T, H, F = 2 * 1024, 512, 1024


def test_a_small_model_counted_by_hand() -> None:
    """One layer on a CPU, in fp32, at its peak: in the backward pass of the MLP, which holds all that was kept."""
    found = planned(LLAMA)
    assert found.peak_at.startswith("backward pass of layer 0, in activate")
    borders = 2 * T * H * 4  # what enters the layer, and what enters the head
    norms = 2 * (T * 4 + T * H * 4)
    attention = T * 3 * H * 4 + 2 * T * H * 4 + T * H * 4 + T * 4 * 4  # joined, turned, out and logarithms
    residual = T * H * 4
    mlp = T * 2 * F * 4 + T * F * 4
    sums = 3 * 4  # of the loss, of the tokens, and of those that the mean is over
    assert found.activations == borders + norms + attention + residual + mlp + sums
    # Position tables; ids, labels and places; the loss mask and what of it counts.
    assert found.other == 2 * 1024 * 64 * 4 + T * (3 * 8 + 4 + 4)
    # The gradients of the layer's output, of what the activation gives and of what it gets.
    assert found.temporaries >= T * H * 4 + T * F * 4 + T * 2 * F * 4
    assert found.communication == 0


def test_recomputation_takes_its_bytes_off() -> None:
    """The MLP keeps what attention adds instead of the sum, its norm, and what is inside."""
    parts = {"--recompute-granularity": "selective", "--recompute-modules": "mlp"}
    saved = planned(LLAMA).activations - planned({**LLAMA, **parts}).activations
    assert saved == T * (H * 4 + H * 4 + 4 + 3 * F * 4 - H * 4)


def test_norms_that_are_formed_again_are_not_kept() -> None:
    """That of attention, and that of the MLP, which is formed again behind the peak."""
    parts = {"--recompute-granularity": "selective", "--recompute-modules": "layernorm"}
    saved = planned(LLAMA).activations - planned({**LLAMA, **parts}).activations
    assert saved == 2 * T * H * 4


def test_on_a_gpu_the_work_space_of_cublas_is_counted() -> None:
    found = planned({**LLAMA, "--device": "cuda", "--bf16": ""})
    assert CUBLAS_BYTES < found.other < CUBLAS_BYTES + 2**20


@pytest.mark.parametrize("is_few", [False, True])
def test_stages_between_the_first_and_last_of_a_kind_are_as_if_followed(*, is_few: bool) -> None:
    plan = examine(
        parse(
            command_line({
                "--num-layers": "6", "--pipeline-model-parallel-size": "6", "--micro-batch-size": "1",
                "--global-batch-size": "8" if is_few else "20", "--dry-run": "",
            })
        ),
        LaunchEnvironment(),
    ).plan  # fmt: skip
    count = plan.derived.num_microbatches
    assert count == (8 if is_few else 20)
    shape = GridShape(pp=6)
    engines = [Engine(plan, build_grid(shape, stage), META) for stage in range(6)]
    flights = simulate([one_forward_one_backward(stage, 6, count) for stage in range(6)]).peak_activations
    found = planned_memory(plan, engines, flights)
    whole = [followed(plan, engine.grid, META, count).memory() for engine in engines]
    assert found[:5] == whole[:5]
    # The head's three sums of a micro-batch stay until the step ends.
    followed_there = min(count, flights[5] + 6 + 1)
    assert whole[5].total - found[5].total == (count - followed_there) * 3 * 4


def test_a_ledger_sees_births_deaths_and_the_peak() -> None:
    with StorageLedger(workspace=lambda func, args: 1000 if func is torch.ops.aten.mul.Tensor else 0) as ledger:
        ledger.current_activity = lambda: "first"
        kept = torch.ones(10, dtype=torch.float64)
        view = kept[2:]
        gone = view + 1
        del gone
        ledger.current_activity = lambda: "second"
        again = kept * 2
        del kept
        gc.collect()
    assert [(s.num_bytes, s.activity, s.freed_at is None) for s in ledger.storages] == [
        (80, "first", True), (64, "first", False), (80, "second", True),
    ]  # fmt: skip
    assert ledger.peak.num_bytes == 80 + 80 + 1000
    assert [s.num_bytes for s in ledger.live_at_peak()] == [80, 80]
    assert (view.numel(), again.numel()) == (8, 10)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (0, 512), (1, 512), (513, 1024), (1 << 20, 1 << 20), ((3 << 20) + 1, (3 << 20) + 512),
        ((11 << 20) + 1, 12 << 20), ((10 << 20) + 1, (10 << 20) + 512), (64 << 20, 64 << 20),
    ],
)  # fmt: skip
def test_bytes_are_counted_as_the_allocator_counts_them(asked: int, given: int) -> None:
    assert allocator_bytes(asked) == given
