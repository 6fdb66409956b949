"""Small models under any layout in one process, and disks that fail.

The ranks of a layout are built one after the other; their messages go through a store, in threads.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from megatrain.checkpoint.chunks import plan_chunks
from megatrain.checkpoint.load import (
    Loaded,
    check_names,
    check_no_unused_tensors,
    load_checkpoint,
    load_shards,
)
from megatrain.checkpoint.parts import merge_parts, write_part
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.save import (
    DirectWriter,
    Save,
    begin_save,
    commit_save,
    merge_reports,
    write_rank_shards,
)
from megatrain.checkpoint.shard_file import ChunkEntry, WrittenFile, write_shard_file
from megatrain.checkpoint.tensor_file import bytes_of
from megatrain.config.derive.lr_schedule import ScheduleValues
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec, MtpSpec
from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.config.model_spec.stack import Stack
from megatrain.model.gpt import build_model
from megatrain.optim.sharded import WEIGHT, ShardedOptimizer
from megatrain.optim.soap import Soap, SoapRule
from megatrain.optim.update_rules import AdamwRule
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.messages import Messages
from megatrain.parallel.rank_lists import GridShape
from megatrain.storage.disk import Disk

CPU = torch.device("cpu")
SOAP = SoapRule(beta1=0.9, beta2=0.99, eps=1e-8, shampoo_beta=0.9, frequency=1, max_dim=40)
"""Of layouts with matrices; 40 is less than the 48 rows of the first layer of an MLP."""
STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Rank:
    """One rank of a layout."""

    grid: RankGrid
    optimizer: ShardedOptimizer

    def set_values(self, seed: int) -> None:
        """Set values that depend on the canonical tensor, kind and seed only."""
        for number, kind in enumerate(self.optimizer.kinds):
            self.optimizer.fill(kind, InitialWeights(10 * seed + number))
        for flat in self.optimizer.state("exp_avg_sq"):
            flat.abs_()
        self.optimizer.step_count = seed

    def clear(self) -> None:
        for flat in (flat for kind in self.optimizer.kinds for flat in self.optimizer.state(kind)):
            flat.zero_()

    def values(self) -> list[torch.Tensor]:
        return [flat.clone() for kind in self.optimizer.kinds for flat in self.optimizer.state(kind)]


def small_spec(*, tied: bool, vocab: int, padded: int, num_layers: int = 2, num_depths: int = 0) -> ModelSpec:
    layer = LayerSpec(
        parts=(
            AttentionSpec(num_heads=4, num_query_groups=2, head_dim=4, rotary=RotarySpec(base=1e4)),
            MlpSpec(ffn_hidden_size=24),
        )
    )
    return ModelSpec(
        hidden_size=16,
        vocab_size=vocab,
        padded_vocab_size=padded,
        stacks=(Stack(layers=(layer,) * num_layers),),
        is_tied=tied,
        init_std=0.1,
        output_init_std=0.05,
        mtp=MtpSpec(num_depths=num_depths, loss_factor=0.3) if num_depths else None,
    )


def build_rank(
    shape: GridShape,
    rank: int,
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.bfloat16,
    master_dtype: torch.dtype = torch.float32,
    is_sharded: bool = True,
) -> Rank:
    if not is_sharded:
        shape = dataclasses.replace(shape, dp_copies=shape.replicas)
    grid = build_grid(shape, rank)
    model = build_model(
        spec, grid, seq_length=8, sequence_parallel=shape.has_experts, dtype=dtype, device=CPU
    )
    buffers = allocate_buffers(
        model.registry, grid=grid, weight_dtype=dtype, grad_dtype=master_dtype, device=CPU
    )
    rule = AdamwRule(beta1=0.9, beta2=0.99, eps=1e-8)
    optimizer = ShardedOptimizer(
        DataParallel(buffers, grid),
        rule,
        matrices=Soap(SOAP, buffers.shards, grid, device=CPU, dtype=master_dtype)
        if shape.has_matrices
        else None,
        clip_grad=1.0,
        master_dtype=master_dtype,
    )
    return Rank(grid, optimizer)


def build_ranks(shape: GridShape, spec: ModelSpec, **options: Any) -> list[Rank]:
    return [build_rank(shape, rank, spec, **options) for rank in range(shape.world_size)]


def one_rank(*, tied: bool = False, seed: int = 1, num_layers: int = 1, **options: Any) -> Rank:
    spec = small_spec(tied=tied, vocab=29, padded=32, num_layers=num_layers)
    rank = build_rank(GridShape(), 0, spec, **options)
    rank.set_values(seed)
    return rank


def training_state(iteration: int) -> dict[str, Any]:
    """The state of a training run with a global batch of 8, as far as a manifest must have it."""
    schedule = dataclasses.asdict(
        ScheduleValues(
            lr=1e-3,
            min_lr=0.0,
            lr_decay_style="linear",
            lr_warmup_samples=0,
            lr_decay_samples=8 * iteration,
            lr_wsd_decay_style="exponential",
            lr_wsd_decay_samples=None,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
            weight_decay_incr_samples=8 * iteration,
        )
    )
    return {
        "seen": iteration,
        "consumed_valid_samples": 0,
        "scheduled_samples": 8 * iteration,
        "schedule": schedule,
        "loss_scale": {},
        "expert_biases": {},
        "has_optimizer": True,
        "is_evaluation_left": False,
        "tokenizer_fingerprint": None,
        "data_plans": {"train": [8 * iteration], "valid": [0], "test": [0]},
        "pass_size": 8,
        "datasets": [],
    }


def save(
    folder: Path,
    rank: Rank,
    iteration: int,
    *,
    state: dict[str, Any] | None = None,
    disk: Disk | None = None,
    with_optimizer: bool = True,
    verifies: bool = False,
    config: dict[str, Any] | None = None,
) -> Path:
    """Save a checkpoint whose state has the iteration, and these values; return the committed folder."""
    kinds = rank.optimizer.kinds if with_optimizer else (WEIGHT,)
    writer = DirectWriter(rank.optimizer, rank.grid, kinds, disk=disk, verifies=verifies)
    config = {"training": {"seed": 1}} if config is None else config
    writer.begin(a_save(folder, rank, iteration, state=state, config=config, disk=disk))
    return writer.commit()


def a_save(
    folder: Path,
    rank: Rank,
    iteration: int,
    *,
    state: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    disk: Disk | None = None,
) -> Save:
    """Return the save of a checkpoint with these values, which a writer begins."""
    return Save(
        folder,
        iteration=iteration,
        consumed_train_samples=8 * iteration,
        optimizer_step_count=rank.optimizer.step_count,
        grid=rank.grid,
        state=training_state(iteration) | (state or {}),
        config=config or {},
        disk=disk,
    )


def load(folder: Path, rank: Rank, **options: Any) -> Loaded:
    return load_checkpoint(folder, rank.optimizer, rank.grid, **options)


def save_all(
    folder: Path,
    ranks: list[Rank],
    iteration: int,
    *,
    chunk_bytes: int = 1 << 20,
    file_bytes: int = 1 << 30,
    in_parts: bool = False,
) -> Path:
    """Save as `save` does, rank after rank; `in_parts`, as with many ranks."""
    disk = Disk()
    final = folder / f"iter_{iteration:07d}"
    temporary = final.with_name(f"{final.name}.tmp-0")
    begin_save(folder, temporary, 0, disk)
    reports = [
        write_rank_shards(
            temporary,
            rank.grid.rank,
            plan_chunks(rank.optimizer, rank.grid, chunk_bytes=chunk_bytes),
            disk,
            file_bytes=file_bytes,
        )
        for rank in ranks
    ]
    reports = json.loads(json.dumps(reports))
    if in_parts:
        reports = [write_part(temporary, number, files, disk) for number, files in enumerate(reports)]
    manifest = (merge_parts if in_parts else merge_reports)(
        reports,
        iteration=iteration,
        consumed_train_samples=8 * iteration,
        optimizer_step_count=ranks[0].optimizer.step_count,
        state=training_state(iteration),
        config={},
    )
    commit_save(temporary, final, manifest, disk)
    return final


def write_tensors(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> WrittenFile:
    """Write a file of fp32 tensors."""
    entries = [ChunkEntry(key, "F32", tuple(values.shape), 4 * values.numel()) for key, values in tensors]
    return write_shard_file(Disk(), path, entries, (bytes_of(values) for _, values in tensors))


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fill_all(path: Path, ranks: list[Rank]) -> None:
    """Load as `load_checkpoint` does, rank after rank."""
    with CheckpointReader(path) as reader:
        used = [
            check_names(reader, rank.optimizer.buffers.registry, rank.optimizer.kinds_of) for rank in ranks
        ]
        check_no_unused_tensors(reader, used)
        for rank in ranks:
            load_shards(reader, rank.optimizer, with_optimizer=True)


def run_ranks(ranks: list[Rank], work: Callable[[Rank], Any]) -> list[Any]:
    """Run `work` on all ranks, connected by a store of this process; return results or exceptions."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def tried(rank: Rank) -> Any:
        messages = Messages(rank.grid.rank, len(ranks), store)
        try:
            return work(dataclasses.replace(rank, grid=dataclasses.replace(rank.grid, messages=messages)))
        except Exception as error:  # noqa: BLE001
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(tried, ranks))


class Killed(BaseException):
    """The process was killed; only the test catches this."""


class FaultyDisk(Disk):
    """Counts operations, and calls `fault` before the one with the number `at`."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0

    def fault(self) -> None:
        raise NotImplementedError

    def _count(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.fault()

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        self._count()
        return super().create(path)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        try:
            self._count()
        except BaseException:
            super().write(file, memoryview(data)[: len(data) // 2])
            raise
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._count()

    def sync_folder(self, path: Path) -> None:
        self._count()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


class DyingDisk(FaultyDisk):
    """Every operation fails from the fault on."""

    def fault(self) -> None:
        self.at = self.count + 1  # the next operation fails as well
        raise Killed


class FullDisk(FaultyDisk):
    """One operation fails for lack of space."""

    def fault(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class RecordingDisk(Disk):
    """Records all operations, so that they can be replayed."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.operations.append(("make_folder", path))

    def create(self, path: Path) -> FileIO:
        self.operations.append(("create", path))
        return super().create(path)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        super().write(file, data)
        self.operations.append(("write", Path(str(file.name)), bytes(data)))

    def sync(self, file: FileIO) -> None:
        self.operations.append(("sync", Path(str(file.name))))

    def sync_folder(self, path: Path) -> None:
        self.operations.append(("sync_folder", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.operations.append(("rename", source, target))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.operations.append(("remove", path))
