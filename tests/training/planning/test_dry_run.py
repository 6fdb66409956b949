"""`--dry-run`: its figures are those of a run, within seconds, for any number of ranks and without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from run_helpers import command_line

import pretrain
from megatrain.checkpoint.background import host_bytes
from megatrain.checkpoint.chunks import plan_chunks
from megatrain.checkpoint.writer_process import SharedMemory
from megatrain.config import ConfigError, parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.dry_run import DryRun, examine
from megatrain.training.planning.dry_run_output import as_text, to_dict
from megatrain.training.planning.gpus import GPUS
from megatrain.training.planning.memory_limit import comparison, memory_warning
from megatrain.training.planning.memory_plan import planned_resident_memory, resident_memory
from megatrain.training.planning.meta_step import MetaOperations

LARGE = {
    "--num-layers": "128", "--hidden-size": "16384", "--ffn-hidden-size": "53248", "--num-attention-heads": "128",
    "--group-query-attention": "", "--num-query-groups": "8", "--untie-embeddings-and-output-weights": "",
    "--seq-length": "8192", "--vocab-size": "128256", "--global-batch-size": "2048", "--train-iters": None,
    "--train-samples": "2000000", "--rampup-batch-size": "256 256 100000", "--lr-warmup-samples": "50000",
    "--lr-decay-style": "cosine", "--bf16": "", "--sequence-parallel": "", "--tensor-model-parallel-size": "8",
    "--pipeline-model-parallel-size": "16", "--device": "cuda", "--world-size": "4096",
}  # fmt: skip


def examined(changed: dict[str, str | None]) -> DryRun:
    words = command_line({**changed, "--dry-run": "json"})
    return examine(parse(words), LaunchEnvironment())


@functools.cache
def large() -> DryRun:
    """The ranks of the large model, with a quarter of its layers."""
    return examined({**LARGE, "--num-layers": "32"})


def counted() -> tuple[DryRun, int]:
    """Return the dry run of the large model and the number of its operations."""
    run, num_operations = MetaOperations.run, itertools.count()

    def counting(*arguments: Any) -> Any:
        next(num_operations)
        return run(*arguments)

    with mock.patch.object(MetaOperations, "run", counting):
        return examined(LARGE), next(num_operations)


def printed(capsys: pytest.CaptureFixture[str], changed: dict[str, str | None]) -> dict[str, Any]:
    assert pretrain.main(command_line({**changed, "--dry-run": "json"})) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.nightly  # test_many_ranks has another
def test_a_model_of_400_billion_on_4096_ranks_takes_seconds() -> None:
    """The number of operations is checked, 0.1 ms each, because times on a busy machine vary."""
    dry_run, num_operations = counted()
    assert 10_000 < num_operations < 100_000
    found = json.loads(json.dumps(to_dict(dry_run)))
    model = found["model"]
    assert model["parameters"] == sum(model["by_part"].values()) == 412_228_796_416
    assert [tree["stages"] for tree in model["stages"]] == [[0], list(range(1, 15)), [15]]
    assert found["ranks"]["axes"]["pp"] == {
        "size": 16, "count": 256, "stride": 256, "first": [0, 256, 512, 3840], "last": [255, 511, 767, 4095],
    }  # fmt: skip
    # 1F1B: bubble (p - 1) / (m + p - 1); stage i has p - i micro-batches in flight.
    assert found["pipeline"]["bubble_share"] == pytest.approx(15 / (64 + 15))
    # The ramp starts at 256 samples, 8 micro-batches of each of 32 replicas.
    assert found["pipeline"]["first_num_microbatches"] == 8
    assert found["pipeline"]["first_bubble_share"] == pytest.approx(15 / (8 + 15))
    assert found["pipeline"]["microbatches_in_flight"] == list(range(16, 0, -1))
    middle = found["memory"][1]
    parameters = model["stages"][1]["parameters"]
    assert middle["held"]["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert middle["held"]["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    assert middle["held"]["optimizer_state"] == pytest.approx(8 * parameters / 32, rel=0.01)
    assert found["flops"]["per_iteration"] == found["plan"]["derived"]["flops_per_iteration"]


def test_stable_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, {})
    assert list(found) == [
        "plan", "model", "flops", "memory", "assumed_gpu", "device_memory_bytes", "memory_warning", "ranks", "data", "timeline", "duration", "pipeline",
        "packs", "host_memory", "host_use",
    ]  # fmt: skip
    assert set(found["memory"][0]) == {
        "held", "held_total", "activations", "temporaries", "communication", "other", "total", "peak_at",
        "activations_on_host", "operations",
    }  # fmt: skip


def test_operations_of_the_host_are_counted() -> None:
    """The limits are those of today: what a layer needs more, each of hundreds of micro-batches pays."""
    dense = {
        "--num-layers": "2",
        "--bf16": "",
        "--global-batch-size": "8",
        "--micro-batch-size": "1",
        "--device": "cuda",
        "--cuda-graph-impl": "none",
    }
    experts = {
        "--num-experts": "8", "--moe-router-topk": "2", "--moe-token-dispatcher-type": "alltoall", "--world-size": "4",
        "--expert-model-parallel-size": "4", "--moe-grouped-gemm": "",
    }  # fmt: skip

    def of_a_layer(changed: dict[str, str | None]) -> int:
        found = [examined({**dense, **changed, "--num-layers": str(layers)}) for layers in (2, 4)]
        few, many = (one.memory[0].operations for one in found)
        shown = as_text(found[0])
        count = found[0].pipeline.num_microbatches
        assert f"host: {few:,} operations a micro-batch, {few * count:,} an iteration" in shown
        return (many - few) // 2

    assert 20 < of_a_layer({}) <= 105
    assert 100 < of_a_layer(experts) <= 200


@pytest.mark.parametrize("tied", ["", None])
def test_a_stage_holds_the_memory_of_its_engine(tied: str | None) -> None:
    """All data-parallel ranks of a stage hold the same."""
    found = examined({
        "--untie-embeddings-and-output-weights": tied, "--pipeline-model-parallel-size": "2", "--bf16": "",
        "--world-size": "4", "--global-batch-size": "4",
    })  # fmt: skip
    for rank in range(4):
        grid = build_grid(GridShape(dp=2, pp=2), rank)
        engine = Engine(found.plan, grid, torch.device("cpu"))
        assert resident_memory(engine.optimizer, engine.model) == found.memory[grid.pp.rank].held
        assert planned_resident_memory(found.plan, grid) == found.memory[grid.pp.rank].held
    assert found.memory[0].held.master_weights > 0


def test_ranks_are_shown_in_the_requested_order() -> None:
    changed: dict[str, str | None] = {
        "--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2", "--world-size": "8",
        "--global-batch-size": "4",
    }  # fmt: skip
    assert "ranks of the stages  0: 0 to 3, 1: 4 to 7" in as_text(examined(changed))
    shown = as_text(examined({**changed, "--use-tp-pp-dp-mapping": ""}))
    assert "pp  4 groups of 2: 0 2 | ... | 5 7" in shown
    assert "ranks of the stages  0: 0 1 4 5, 1: 2 3 6 7" in shown


def test_landmarks_are_those_of_the_schedules() -> None:
    timeline = examined({
        "--global-batch-size": "8", "--train-iters": None, "--train-samples": "400", "--lr": "1",
        "--rampup-batch-size": "2 2 60", "--lr-warmup-samples": "20", "--lr-decay-samples": "300",
        "--lr-decay-style": "linear", "--eval-iters": "2", "--eval-interval": "10", "--save": "nowhere",
        "--save-interval": "25",
    }).timeline  # fmt: skip
    marks = {mark.what: mark for mark in timeline.landmarks}
    assert [mark.what for mark in timeline.landmarks] == [
        "start", "warm-up ends", "batch grows to 4", "batch grows to 6", "batch grows to 8", "decay ends",
        "last iteration",
    ]  # fmt: skip
    assert (marks["warm-up ends"].iteration, marks["warm-up ends"].lr) == (11, 1.0)
    assert marks["batch grows to 4"].consumed_samples == 20
    assert marks["decay ends"].lr == pytest.approx(0, abs=0.03)
    last = marks["last iteration"]
    assert last.iteration == timeline.train_iters
    assert last.consumed_samples + last.global_batch_size == timeline.train_samples
    assert timeline.evaluations.count == (timeline.train_iters - 1) // 10 + 1
    assert timeline.checkpoints.count == -(-timeline.train_iters // 25)
    assert not Path("nowhere").exists()


def test_problems_are_those_of_a_real_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(command_line({"--dry-run": "", "--num-attention-heads": "3", "--lr": None})) == 2
    errors = capsys.readouterr().err
    assert "--num-attention-heads 3" in errors
    assert "--lr is missing" in errors


def test_the_source_of_the_world_size_is_shown() -> None:
    layout = {"--tensor-model-parallel-size": "2", "--pipeline-model-parallel-size": "2"}
    alone = examined(layout).ranks
    assert (alone.world_size, alone.reason.partition(";")[0]) == (4, "smallest number for this layout")
    assert examined({**layout, "--world-size": "8"}).ranks.reason == "--world-size"
    started = examine(parse(command_line({"--dry-run": ""})), LaunchEnvironment(world_size=2)).ranks
    assert (started.world_size, started.reason) == (2, "number of launched ranks")


def test_only_rank_0_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert pretrain.main(command_line({"--dry-run": "json"})) == 0
    assert capsys.readouterr().out == ""


def test_a_plan_for_gpus_needs_no_gpu() -> None:
    found = examined({"--device": None, "--bf16": "", "--world-size": "8"})
    assert found.plan.config.training.device == "cuda"
    assert found.plan.config.parallel.distributed_backend == "nccl"
    assert examined({"--device": "cpu", "--world-size": "8"}).plan.config.training.device == "cpu"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_needs_less_memory(recompute: str) -> None:
    words = {"--recompute-granularity": recompute}
    words |= (
        {"--recompute-method": "uniform", "--recompute-num-layers": "1"}
        if recompute == "full"
        else {"--recompute-modules": "mlp"}
    )
    small = {**LARGE, "--num-layers": "4", "--pipeline-model-parallel-size": "2", "--world-size": "16"}
    assert examined({**small, **words}).memory[0].total < examined(small).memory[0].total


def test_text_has_every_paragraph() -> None:
    text = as_text(large())
    for start in ("given on the command line", "model:", "FLOPs:", "memory of a rank", "ranks:", "pipeline:",
                  "data:", "timeline:"):  # fmt: skip
        assert re.search(f"^{start}", text, re.MULTILINE), start
    assert "layers 2 to 3, each" in text
    assert "512 groups of 8: 0 1 2 3 4 5 6 7 | ... | 4088" in text


def test_a_run_that_resumes_is_planned_from_its_checkpoint(tmp_path: Path) -> None:
    run = {
        "--save": str(tmp_path / "run"),
        "--load": str(tmp_path / "run"),
        "--save-interval": "2",
        "--lr-decay-iters": "9",
    }
    assert pretrain.main(command_line(run)) == 0
    before = sorted(tmp_path.rglob("*"))
    timeline = examined({**run, "--train-iters": "7"}).timeline
    assert (timeline.start_iteration, timeline.landmarks[0].iteration) == (2, 3)
    assert (timeline.checkpoints.count, timeline.checkpoints.first) == (3, 4)
    assert sorted(tmp_path.rglob("*")) == before


def test_epochs_follow_from_samples_and_weights(tmp_path: Path) -> None:
    for name, num_documents in (("a", 100), ("b", 300)):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(num_documents):
                writer.add_document([[1] * 32])
    uses = examined({
        "--mock-data": None, "--data-path": f"3 {tmp_path / 'a'} 1 {tmp_path / 'b'}", "--split": "90,10,0",
        "--seq-length": "16", "--global-batch-size": "8", "--train-iters": "100", "--eval-iters": "1",
    }).data  # fmt: skip
    found = {(use.split, Path(use.dataset).name): (use.samples, use.tokens, use.epochs) for use in uses}
    assert found == {
        ("train", "a"): (600, 2880, pytest.approx(600 * 16 / 2880)),
        ("train", "b"): (200, 8640, pytest.approx(200 * 16 / 8640)),
        ("valid", "a"): (6, 320, pytest.approx(6 * 16 / 320)),
        ("valid", "b"): (2, 960, pytest.approx(2 * 16 / 960)),
    }
    assert not list(tmp_path.glob("index_cache/*"))


def test_data_that_does_not_suffice_is_a_warning(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(100):
                writer.add_document([[1] * 32])
    flags = {
        "--mock-data": None, "--data-path": f"{tmp_path / 'a'} {tmp_path / 'b'}", "--split": "100,0,0", "--seq-length": "16",
        "--global-batch-size": "8", "--eval-iters": "1",
    }  # fmt: skip
    found = examined({**flags, "--train-iters": "100"})
    assert "  WARNING: about 400 training samples are missing" in as_text(found)
    assert found.timeline.evaluations.count == 0
    assert "WARNING: about" not in as_text(examined({**flags, "--train-iters": "50"}))
    stopped = {**flags, "--train-iters": "100", "--phase-transition-iterations": "40"}
    assert "WARNING: about" not in as_text(examined(stopped))
    found = examined({**flags, "--split": "90,10,0", "--train-iters": "45"})
    assert found.timeline.evaluations.count == 1


def test_a_ramp_shows_the_bubble_of_its_first_iteration() -> None:
    assert "first iteration: 8 micro-batches, bubble 65.2% of the time" in as_text(large())
    steady = {"--pipeline-model-parallel-size": "2", "--global-batch-size": "8"}
    assert "first iteration" not in as_text(examined(steady))


def test_a_rank_that_fits_into_no_gpu_is_a_warning_with_remedies() -> None:
    tiny = examined({"--device": "cuda", "--world-size": "2"})
    assert tiny.memory_warning is None
    assert (
        "exceeds the 85.00 GB of the H100 that --assume-gpu h100 names; a GPU such as the H200 has 141"
        in (comparison(tiny.plan, 100 * 10**9, 85 * 10**9, "H100") or "")
    )
    assert "and the 288 GB of the largest GPU" in (
        comparison(tiny.plan, 289 * 10**9, 85 * 10**9, "H100") or ""
    )
    assert "and takes 96% of them" in (memory_warning(tiny.plan, 96 * 10**9, 100 * 10**9) or "")
    assert memory_warning(tiny.plan, 95 * 10**9, 100 * 10**9) is None
    warning = memory_warning(tiny.plan, 81 * 10**9, 80 * 10**9) or ""
    assert "exceeds the 80.00 GB of this host's GPU" in warning
    remedies = warning.partition("fix: ")[2]
    order = ["--bf16", "--recompute-activations", "--tensor-model-parallel-size", "--optimizer-cpu-offload"]
    assert [flag for flag in sorted(order, key=remedies.index) if flag in remedies] == order
    assert "--micro-batch-size" not in remedies  # it is 1
    assert f"warning: {warning}\n" in as_text(dataclasses.replace(tiny, memory_warning=warning))
    on_cpu = examined({"--device": "cpu"})
    assert memory_warning(on_cpu.plan, 10**12, None) is None


@pytest.mark.parametrize("flags", ["--recompute-activations", "--sequence-parallel", "--bf16"])
def test_a_remedy_that_is_used_is_not_named_again(flags: str) -> None:
    plan = examined(
        {"--device": "cuda", "--world-size": "2", "--tensor-model-parallel-size": "2", flags: ""}
    ).plan
    assert flags not in (memory_warning(plan, 10**12, 10**11) or flags)


def test_a_dry_run_assumes_a_gpu() -> None:
    """Its memory, and the formats that it multiplies: what the cluster lacks is refused here already."""
    found = examined({"--device": "cuda", "--world-size": "2"})
    assert (found.assumed_gpu, found.device_memory_bytes) == ("H100", 85 * 10**9)
    assert "of the H200 that --assume-gpu h200 names" in as_text(
        examined({"--device": "cuda", "--assume-gpu": "h200"})
    )
    with pytest.raises(ConfigError, match="NVIDIA A100 has none"):
        examined({"--device": "cuda", "--assume-gpu": "a100", "--bf16": "", "--fp8-format": "hybrid"})
    with pytest.raises(ConfigError, match="requires Blackwell GPUs, and NVIDIA H100 is not one"):
        examined({"--device": "cuda", "--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"})


def test_an_ignored_flag_for_memory_is_an_error_if_the_run_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"--device": "cuda", "--bf16": "", "--offload-modules": "core_attn"}
    assert examined(flags).memory_warning is None
    monkeypatch.setitem(GPUS, "H100", dataclasses.replace(GPUS["H100"], memory_bytes=1000))
    with pytest.raises(
        ConfigError,
        match=r"no effect without --fine-grained-activation-offloading; .*exceeds.*\n.*fix: use",
    ):
        examined(flags)
    assert examined({"--device": "cuda"}).memory_warning is not None


def test_offloaded_activations_are_in_host_memory() -> None:
    flags = {"--device": "cuda", "--bf16": "", "--min-offloaded-tensor-size": "0"}
    found = examined({**flags, "--cpu-offloading-num-layers": "2"})
    (stage,) = found.memory
    assert 0 < stage.activations_on_host < 2 * examined(flags).memory[0].activations
    assert found.host_use is not None
    assert found.host_use.per_host == stage.activations_on_host
    assert "--cpu-offloading-num-layers: up to " in as_text(found)
    assert "  host memory: the " in as_text(found)


def test_memory_is_compared_with_this_hosts_gpu() -> None:
    found = large()
    for limit, words in (
        (
            10**9,
            f"the largest total of {max(stage.total for stage in found.memory) / 1e9:.2f} GB exceeds the 1.00 GB",
        ),
        (10**12, "the largest total fits into the 1000.00 GB"),
    ):
        assert words in as_text(dataclasses.replace(found, device_memory_bytes=limit))


def test_host_memory_of_background_saves_is_that_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of four ranks; the first has the stage with the embedding, the second the one with the head."""
    words = command_line(
        {
            "--save": str(tmp_path), "--async-save": "", "--tensor-model-parallel-size": "2", "--vocab-size": "3000",
            "--pipeline-model-parallel-size": "2", "--untie-embeddings-and-output-weights": "", "--dry-run": "text",
        }
    )  # fmt: skip
    launched = LaunchEnvironment(world_size=8, local_world_size=4)
    found = examine(parse(words), launched)
    memory = found.host_memory
    assert memory is not None
    grids = [build_grid(grid_shape(found.plan), rank) for rank in range(8)]
    optimizers = [Engine(found.plan, grid, torch.device("meta")).optimizer for grid in grids]
    copies = [
        host_bytes(plan_chunks(optimizer, grid)) for optimizer, grid in zip(optimizers, grids, strict=True)
    ]
    assert (memory.per_rank[0], memory.per_rank[1]) == (copies[0], copies[4])
    assert memory.per_host == pytest.approx(max(sum(copies[:4]), sum(copies[4:])), rel=0.05)
    assert (memory.ranks_per_host, memory.reason) == (4, "as launched")
    assert "on a host of 4 ranks (as launched)" in as_text(found)
    assert "it fits into the" in as_text(found)
    monkeypatch.setattr("megatrain.training.planning.host_memory.available_bytes", lambda: 1000)
    assert "the run would not start here" in as_text(examine(parse(words), launched))
    weights = examine(parse([*words, "--no-save-optim"]), launched).host_memory
    assert weights is not None
    assert weights.kinds == ("weight",)
    assert weights.per_host == pytest.approx(memory.per_host / 3, rel=0.05)


@pytest.mark.nightly
def test_host_memory_is_that_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: dict[str, str | None] = {"--save": str(tmp_path), "--async-save": ""}
    planned, allocated = examined(flags).host_memory, []

    def counted(num_bytes: int) -> SharedMemory:
        allocated.append(num_bytes)
        return SharedMemory(num_bytes)

    monkeypatch.setattr("megatrain.checkpoint.background.SharedMemory", counted)
    assert pretrain.main(command_line(flags)) == 0
    assert planned is not None
    assert (planned.per_rank, planned.per_host) == ((allocated[0],), allocated[0])
    assert examined({"--save": str(tmp_path / "other")}).host_memory is None
    assert examined({"--async-save": ""}).host_memory is None


def test_the_end_of_the_timeline_has_days_bytes_and_the_cost_of_a_failure(tmp_path: Path) -> None:
    flags = {
        "--device": "cuda",
        "--save": str(tmp_path),
        "--save-interval": "10",
        "--train-iters": "100",
        "--bf16": "",
    }
    found = examined(flags)
    assert found.duration.checkpoint_bytes == 12 * found.model.parameters  # fp32 weights and moments
    assert found.duration.kept_checkpoints == 10
    peak = 989e12 * 0.4 * found.ranks.world_size
    assert found.duration.seconds_per_iteration == pytest.approx(found.flops.per_iteration / peak)
    week = dataclasses.replace(found.duration, seconds_per_iteration=6048.0, checkpoint_bytes=847 * 10**9)
    text = as_text(dataclasses.replace(found, duration=week))
    assert "847 GB each, all 8.5 TB (--keep-last 3: 2.5 TB)" in text
    assert "duration: about 7.0 days, 6.05e+03 s an iteration" in text
    assert "failure: 16.8 hours between saves; one loses 8.4 hours on average" in text
    assert examined({**flags, "--keep-last": "3"}).duration.kept_checkpoints == 3
    assert examined({"--device": "cpu"}).duration.seconds_per_iteration is None
