"""Summary of the model at start: parameters, memory by class, and process groups."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatrain.parallel.collectives import all_reduce
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import Piece
from megatrain.training.engine import Engine
from megatrain.training.planning.memory_plan import resident_memory
from megatrain.training.planning.model_tree import active_parameters, expert_elements


def model_summary(engine: Engine) -> str:
    """Return the lines about the model and this rank. All ranks call it, because parameters are summed over ranks."""
    held = resident_memory(engine.optimizer, engine.model)
    has_master = held.master_weights or held.on_host
    num_local = _numel(
        piece
        for entry in engine.model.registry.entries.values()
        if entry.layout.kind != "scale"
        for piece in entry.layout.pieces
    )
    parts = [
        f"weights {_size(held.weights)}",
        f"gradients {_size(held.gradients)}",
        f"master weights {_size(held.master_weights)}" if has_master else "no separate master weights",
        f"moments {_size(held.optimizer_state)}",
        *([f"teacher {_size(held.teacher)}"] if held.teacher else []),
    ]
    on_host = f"; in host memory {_size(held.on_host)}" if held.on_host else ""
    return "\n".join(
        [
            f"> model: {_whole_model(engine)}; rank {engine.grid.rank} holds {num_local:,}",
            f"> memory of rank {engine.grid.rank} without activations: {_size(held.total)} ({', '.join(parts)}){on_host}",
            f"> grid: {grid_summary(engine.grid)}",
        ]
    )


def grid_summary(grid: RankGrid) -> str:
    """Return the sizes of the axes, and the groups of this rank."""
    shape = grid.shape
    ranks = f"{shape.world_size} rank{'s' if shape.world_size > 1 else ''}"
    cp = f" x cp {shape.cp}" if shape.cp > 1 else ""
    text = f"{ranks} = tp {shape.tp}{cp} x dp {shape.dp} x pp {shape.pp}"
    if shape.etp is not None:
        text += f", for experts etp {shape.etp} x ep {shape.ep} x dp {shape.expert_replicas} x pp {shape.pp}"
    if shape.world_size == 1:
        return text
    expert_groups = (grid.etp, grid.ep) if shape.has_experts else ()
    groups = [
        f"{g.name} {list(g.ranks)}"
        for g in (grid.tp, grid.cp, grid.dp, grid.pp, *expert_groups)
        if g.size > 1
    ]
    return f"{text}; rank {grid.rank} is in {', '.join(groups)}"


def _whole_model(engine: Engine) -> str:
    grid, routers = engine.grid, engine.model.spec.routers_by_name
    pieces = [
        piece
        for entry in engine.model.registry.entries.values()
        if grid.family(entry.layout.family).replicas.is_first and entry.layout.kind != "scale"
        for piece in entry.layout.pieces
        if grid.is_first_of(piece.copies)
    ]
    experts = expert_elements(((piece.name, math.prod(piece.local_shape)) for piece in pieces), routers)
    counts = torch.tensor([_numel(pieces), *experts.values()], device=engine.device)
    total, *of_experts = all_reduce(counts, grid.world).tolist()
    active = active_parameters(total, dict(zip(experts, of_experts, strict=True)), routers)
    return f"{total:,} parameters" + (f", {active:,} active per token" if routers else "")


def _numel(pieces: Iterable[Piece]) -> int:
    return sum(math.prod(piece.local_shape) for piece in pieces)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
