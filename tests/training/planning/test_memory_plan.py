"""The planned memory equals that of a real step on a CPU, storage for storage, and a count by hand for a small model."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday import one_in, only
from run_helpers import command_line

from megatrain.config import Plan, parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.schema.pipeline_schedules import ONE_CHUNK, SEVERAL_CHUNKS
from megatrain.parallel import collectives
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.collectives import Transfer
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.pipeline.actions import Placement
from megatrain.parallel.pipeline.schedule import PipelineSchedule
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


def recorded(plan: Plan, grid: RankGrid, device: torch.device, num_microbatches: int = 2) -> RecordedStep:
    """Record a step on a CPU, with real or meta tensors."""
    return recorded_storages(plan, grid, device, num_microbatches)[0]


def recorded_storages(
    plan: Plan, grid: RankGrid, device: torch.device, num_microbatches: int = 2
) -> tuple[RecordedStep, list[int]]:
    """Record a step on a CPU; return it and the bytes of all storages of its passes, in their order."""
    if device == CPU:
        ledger = device_ledger(as_cuda=False)
        step = record_step(plan, grid, CPU, num_microbatches=num_microbatches, ledger=ledger)
    else:
        with meta_device_as(as_cuda=False) as operations:
            ledger = device_ledger(as_cuda=False, run=operations.run)
            step = record_step(plan, grid, META, num_microbatches=num_microbatches, ledger=ledger)
    return step, [storage.num_bytes for storage in ledger.storages if storage.activity is not None]


WITH = {"gemma2": "documents", "gpt2": "attentiondropout"}
OF_EXPERTS = {"recomputemoe", "recomputeshared"}
OF_ONE_MODEL = {"chunkedmlp"}
MADE = [
    *(
        f"{recompute} {model} {WITH.get(model, '')}"
        for model in sorted(MODELS)
        for recompute in OPTIONS["recomputation"]
        if recompute not in OF_EXPERTS | OF_ONE_MODEL
    ),
    *(
        f"{recompute} {experts}"
        for experts in ("mixtral", "deepseek")
        for recompute in OPTIONS["recomputation"]
        if recompute not in OF_ONE_MODEL and (experts == "deepseek" or recompute != "recomputeshared")
    ),
    "chunkedmlp gpt2",
    "mtp2 uniform",
    "mtp1 deepseek qwen",
    "norecompute latentexperts quantiles",
    "recomputemoe biasedexperts",
    "fp8tensorwise",
    "uniform gpt2 fp8delayed",
    "selective fp8bf16wgrad",
    "fp8blockwise",
    "mixtral fp8tensorwise",
    "offloadmodules recomputenorms",
    "mixtral offloadlayers",
    "uniform offloadinputs",
    "deepseek mla offloadmodules",
]


@pytest.mark.parametrize("words", one_in(7, MADE))
def test_a_meta_step_allocates_the_storages_of_a_real_one(words: str) -> None:
    layout = Layout.of(words)
    plan, grid = tiny_plan(layout, 1), build_grid(GridShape(), 0)
    real, planned = recorded(plan, grid, CPU), recorded(plan, grid, META)
    assert planned.by_class == real.by_class
    assert planned.memory().peak_at == real.memory().peak_at


def test_passes_on_the_meta_device_allocate_every_storage_of_real_ones() -> None:
    plan, grid = tiny_plan(Layout.of("selective qwen"), 1), build_grid(GridShape(), 0)
    real, planned = (recorded_storages(plan, grid, device)[1] for device in (CPU, META))
    assert planned == real


class LocalDist:
    """Replacement of torch.distributed: collectives of real tensors without other ranks. Received values are 0.

    gloo is not used, because its threads keep tensors alive a little longer than `wait`.
    """

    def all_reduce(self, x: torch.Tensor, **_: Any) -> Transfer:
        return Transfer(None, x)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        out.zero_()
        return Transfer(None, out, x)

    def isend(self, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        return Transfer(None, x)

    def irecv(self, x: torch.Tensor, *_: Any, **__: Any) -> Transfer:
        x.zero_()
        return Transfer(None, x)

    def P2POp(self, how: Callable[..., Transfer], x: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # noqa: N802
        return how, x

    def batch_isend_irecv(self, both: list[tuple[Any, ...]]) -> list[Transfer]:
        return [how(x) for how, x in both]


OVER_RANKS = [
    "tp2 sp tied",
    "tp2 sp tpoverlap",
    "tp4 groups1 olmo2",
    "dp4 zero1 overlap",
    "dp4 zero1 nooverlap",
    "tp2 dp2 zero3",
    "dp4 zero2 overlap",
    "pp4 batch8",
    "tp2 sp dp2 pp2 zero1 gpt2",
    "cp2",
    "cp4 allgather documents",
    "tp2 sp cp2 allgather mla",
    "tp2 sp cp2 heads gpt2",
    "tp2 sp pp2 mtp2 tied",
    "pp4 mtpalone mtp2",
    "tp2 sp dp2 zero3 fp8tensorwise",
    "tp2 dp2 zero1 overlap fp8gather",
    "dp2 zero3 overlap mixtral ep2 batch12 moeoverlap",
    "pp4 zbh1 batch8 offloadlayers",
]
EVERYDAY = {
    "tp2 sp dp2 pp2 zero1 gpt2",
    "pp4 mtpalone mtp2",
    "tp2 sp dp2 zero3 fp8tensorwise",
    "dp2 zero3 overlap mixtral ep2 batch12 moeoverlap",
}


@pytest.mark.parametrize("text", only(EVERYDAY, OVER_RANKS))
def test_the_plan_of_each_rank_equals_its_real_step(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(text)
    plan = tiny_plan(layout, layout.world_size)
    count = plan.derived.num_microbatches
    planned = [recorded(plan, grid, META, count).by_class for grid in first_and_last(plan)]
    local = LocalDist()
    monkeypatch.setattr(collectives, "dist", local)
    for name in ("_ALL_GATHER", "_REDUCE_SCATTER"):
        monkeypatch.setattr(collectives, name, local.all_to_all_single)
    assert planned == [recorded(plan, grid, CPU, count).by_class for grid in first_and_last(plan)]
    assert all(sum(by_class.values()) > 0 for by_class in planned)


def first_and_last(plan: Plan) -> Iterator[RankGrid]:
    for rank in (0, plan.derived.world_size - 1):
        yield build_grid(grid_shape(plan), rank)


OFFLOAD: dict[str, str | None] = {"--bf16": "", "--optimizer-cpu-offload": ""}


@pytest.mark.parametrize("flags", [{"--bf16": ""}, {"--fp16": ""}, {"--optimizer": "sgd"}, OFFLOAD])
def test_other_dtypes_and_optimizers_too(flags: dict[str, str | None]) -> None:
    plan = examine(parse(command_line({**flags, "--dry-run": ""})), LaunchEnvironment()).plan
    grid = build_grid(GridShape(), 0)
    assert recorded(plan, grid, META).by_class == recorded(plan, grid, CPU).by_class


def test_offloaded_state_takes_no_device_memory() -> None:
    """Master weights and two moments in fp32; staging buffers for the fp32 gradients and bf16 weights of two buckets."""
    on_device, offloaded = planned({"--bf16": ""}), planned(OFFLOAD)
    state = on_device.held.master_weights + on_device.held.optimizer_state
    assert (offloaded.held.master_weights, offloaded.held.optimizer_state) == (0, 0)
    assert on_device.total - offloaded.total == state
    assert on_device.held.on_host == 0
    staging = offloaded.held.on_host - state
    largest = max(shard.numel for shard in engine_of(OFFLOAD).buffers.shards)
    assert staging == 2 * largest * (4 + 2)
    half = planned({**OFFLOAD, "--optimizer-offload-fraction": "0.5"}).held
    assert half.master_weights + half.optimizer_state + half.on_host - staging == state
    assert 0 < half.master_weights + half.optimizer_state <= state / 2


def test_the_state_of_soaps_matrices_is_counted() -> None:
    """Of each matrix: two covariances, two bases and a second moment, as far as its sides are within the limit."""
    limit, numbers = 48, 0
    for name, tensor in engine_of({}).model.registry.entries.items():
        layout, matrices = tensor.layout, []
        if layout.group.is_matrix:
            rows = [piece.shape[0] for piece in layout.pieces] if layout.is_qkv else [layout.shape[0]]
            matrices = [(one, layout.shape[1]) for one in rows]
        for matrix in matrices:
            numbers += math.prod(matrix) + sum(2 * side**2 for side in matrix if side <= limit)
            assert min(matrix) <= limit, name
    muon, soap = (
        planned({"--optimizer": "muon"}),
        planned({"--optimizer": "soap", "--soap-max-preconditioner-dim": str(limit)}),
    )
    assert soap.held.optimizer_state - muon.held.optimizer_state == 4 * numbers


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
    """One layer on a CPU in fp32. The peak is in the backward pass of the MLP, before any saved tensor is freed."""
    found = planned(LLAMA)
    assert found.peak_at.startswith("backward pass of layer 0, in activate")
    inputs = T * H * 4  # of the layer; that of the head is freed after its backward pass
    norms = 2 * (T * 4 + T * H * 4)
    attention = (
        T * 3 * H * 4 + 2 * T * H * 4 + T * H * 4 + T * 4 * 4
    )  # fused QKV, q and k with RoPE, output, log-sum-exp
    residual = T * H * 4
    mlp = T * 2 * F * 4 + T * F * 4
    sums = 2 * 4  # of the loss and of the tokens
    roots = 2 * 4  # of the graphs of the embedding and the layer
    assert found.activations == inputs + norms + attention + residual + mlp + sums + roots
    # RoPE tables; token ids, labels and position ids; the loss mask and its sum.
    assert found.other == 2 * 1024 * 64 * 4 + T * (3 * 8 + 4) + 4
    # The gradients of the layer's output, of the activation's output and of its input.
    assert found.temporaries >= T * H * 4 + T * F * 4 + T * 2 * F * 4
    assert found.communication == 0


LONG = {
    **LLAMA, "--num-layers": "2", "--hidden-size": "4096", "--ffn-hidden-size": "14336", "--num-attention-heads": "32",
    "--group-query-attention": "", "--num-query-groups": "8", "--vocab-size": "128256", "--device": "cuda", "--bf16": "",
    "--seq-length": "262144", "--micro-batch-size": "1", "--world-size": "2", "--context-parallel-size": "2",
    "--cp-comm-type": "a2a", "--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1",
}  # fmt: skip


def test_a_document_of_262144_tokens_counted_by_hand_and_traced_operation_by_operation() -> None:
    """Two recomputed layers of Llama-3-8B on two ranks: the plan has 41.7 GB, and two GPUs measured 41.8."""
    found = planned_and_traced({"--mlp-chunks-for-training": "1"})
    rows, h, f = 262144 // 2, 4096, 14336
    stream, qkv, attended = rows * h, rows * (h + 2 * 1024), rows * (h + 2 * 32)  # with an fp32 log-sum-exp
    # The gradient of the output; attention from its norm to its projection, whose input was exchanged; the MLP to fc2's output.
    parts = stream, stream + qkv + attended + 2 * stream, 2 * stream + rows * 3 * f + stream
    assert found["temporaries"] == pytest.approx(2 * sum(parts), rel=0.001)
    chunked = planned_and_traced({})  # 8 chunks; the peak is the backward pass of attention
    assert sum(found.values()) - sum(chunked.values()) > 9e9


def planned_and_traced(flags: dict[str, str | None]) -> dict[str, int]:
    """Return the bytes by class at the peak, which are the same with and without the plan's cache of results."""
    plan = examine(parse(command_line({**LONG, **flags, "--dry-run": ""})), LaunchEnvironment()).plan
    grid, found = build_grid(grid_shape(plan), 0), []
    with meta_device_as(as_cuda=True) as operations:
        for run in (operations.run, traced):
            ledger = device_ledger(as_cuda=True, run=run)
            found.append(record_step(plan, grid, META, num_microbatches=1, ledger=ledger).by_class)
    assert found[0] == found[1]
    return found[0]


def traced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run each operation with torch's own rules for meta tensors, without the plan's cache of results."""
    if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        return 1
    return func(*args, **kwargs)


def test_recomputation_saves_its_bytes() -> None:
    """The MLP saves the output of attention instead of the sum, the norm and its inner activations."""
    parts = {"--recompute-granularity": "selective", "--recompute-modules": "mlp"}
    saved = planned(LLAMA).activations - planned({**LLAMA, **parts}).activations
    assert saved == T * (H * 4 + H * 4 + 4 + 3 * F * 4 - H * 4)


def test_recomputed_norms_are_not_saved() -> None:
    """The norms of attention and of the MLP; the latter is recomputed after the peak."""
    parts = {"--recompute-granularity": "selective", "--recompute-modules": "layernorm"}
    saved = planned(LLAMA).activations - planned({**LLAMA, **parts}).activations
    assert saved == 2 * T * H * 4


def test_the_memory_for_overlapped_sends_is_counted() -> None:
    """Four slots for a whole sequence each, and the flags."""
    flags: dict[str, str | None] = {
        "--device": "cuda",
        "--bf16": "",
        "--world-size": "2",
        "--tensor-model-parallel-size": "2",
    }
    plain = planned({**LLAMA, **flags, "--sequence-parallel": ""})
    overlapped = planned({**LLAMA, **flags, "--sequence-parallel": "", "--tp-comm-overlap": ""})
    assert overlapped.communication == plain.communication + 4 * T * H * 2 + 512


def test_graphs_keep_their_memory_during_the_update() -> None:
    """An update of Muon takes memory of its own, which without graphs was that of the passes before."""
    flags = {**LLAMA, "--optimizer": "muon", "--device": "cuda", "--bf16": ""}
    plain, graphed = (
        planned(flags | more) for more in ({"--cuda-graph-impl": "none"}, {"--cuda-graph-impl": "local"})
    )
    assert plain.total < graphed.total <= plain.total + plain.held.total


def test_on_a_gpu_the_workspace_of_cublas_is_counted() -> None:
    found = planned({**LLAMA, "--device": "cuda", "--bf16": ""})
    assert CUBLAS_BYTES < found.other < CUBLAS_BYTES + 2**20


@pytest.mark.parametrize("is_few", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_interpolated_stages_equal_recorded_ones(*, is_few: bool) -> None:
    plan = examine(
        parse(
            command_line({
                "--num-layers": "6", "--pipeline-model-parallel-size": "6", "--micro-batch-size": "1",
                "--global-batch-size": "8" if is_few else "14", "--dry-run": "",
            })
        ),
        LaunchEnvironment(),
    ).plan  # fmt: skip
    count = plan.derived.num_microbatches
    assert count == (8 if is_few else 14)
    shape = GridShape(pp=6)
    engines = [Engine(plan, build_grid(shape, stage), META) for stage in range(6)]
    schedule = PipelineSchedule(ONE_CHUNK, Placement(6))
    flights = simulate([schedule.training(rank, count) for rank in range(6)]).peak_activations
    found = planned_memory(plan, engines, flights)
    whole = [recorded(plan, engine.grid, META, count).memory() for engine in engines]
    assert found[:5] == whole[:5]
    # The head's two sums of a micro-batch stay until the step ends.
    num_recorded = min(count, flights[5] + 6 + 1)
    assert whole[5].total - found[5].total == (count - num_recorded) * 2 * 4


@pytest.mark.parametrize(("count", "group"), one_in(3, [(13, 2), (12, 2), (17, 4)]))
def test_three_groups_of_interleaved_micro_batches_have_the_memory_of_all(count: int, group: int) -> None:
    plan = examine(
        parse(
            command_line({
                "--num-layers": "4", "--pipeline-model-parallel-size": "2", "--num-layers-per-virtual-pipeline-stage": "1",
                "--microbatch-group-size-per-virtual-pipeline-stage": str(group), "--micro-batch-size": "1",
                "--global-batch-size": str(count), "--dry-run": "",
            })
        ),
        LaunchEnvironment(),
    ).plan  # fmt: skip
    shape = grid_shape(plan)
    engines = [Engine(plan, build_grid(shape, stage), META) for stage in range(2)]
    placement = engines[0].model.placement
    schedule = PipelineSchedule(SEVERAL_CHUNKS, placement, group_size=group)
    schedules = [schedule.training(rank, count) for rank in range(2)]
    flights = simulate(schedules, placement=placement).peak_activations
    found = planned_memory(plan, engines, flights)
    whole = [recorded(plan, engine.grid, META, count).memory() for engine in engines]
    assert found[0] == whole[0]
    # The head's two sums of a micro-batch stay until the step ends.
    assert whole[1].total - found[1].total == (count - (3 * group + count % group)) * 2 * 4


def test_a_ledger_records_allocations_frees_and_the_peak() -> None:
    with StorageLedger(
        workspace=lambda func, args: 1000 if func is torch.ops.aten.mul.Tensor else 0
    ) as ledger:
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
def test_bytes_are_rounded_as_the_allocator_rounds_them(asked: int, given: int) -> None:
    assert allocator_bytes(asked) == given
