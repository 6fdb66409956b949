"""Compare weights that several ranks hold: a bit that flips in one GPU's memory stays unnoticed otherwise.

    weights -> one number per tensor and rank: the sum of its bit patterns -> all-gathered over the ranks with the same weights

Ranks hold the same weights as replicas, and along the axes that do not split a tensor, such as norms under tensor parallelism.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.config.errors import MegatrainError
from megatrain.parallel.collectives import all_gather, gather_json
from megatrain.training.engine import Engine

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaError(MegatrainError):
    """Ranks with the same weights have different bits, on all ranks."""


def check_replicas(engine: Engine, iteration: int) -> None:
    """Compare the weights of all ranks, bit by bit; all ranks call it.

    Raises:
        ReplicaError: on all ranks; the message names the ranks that differ from most others, their hosts and tensors.
    """
    grid, found = engine.grid, dict[int, list[str]]()
    numbers: defaultdict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for group, name, number in _numbers(engine):
        numbers[group].append((name, number))
    for group, tensors in sorted(numbers.items(), key=lambda item: item[0]):  # one order on all ranks
        names, sums = zip(*tensors, strict=True)
        members = grid.group(group)
        of_ranks = all_gather(torch.stack(sums)[None], members).tolist()
        for name, values in zip(names, zip(*of_ranks, strict=True), strict=True):
            for place in _odd_places(values):
                found.setdefault(members.ranks[place], []).append(name)
    own = found.get(grid.rank, [])
    answers = gather_json([socket.gethostname(), own], grid.world, engine.device)
    odd = [(rank, host, names) for rank, (host, names) in enumerate(answers) if names]
    if odd:
        ranks = "; ".join(f"rank {rank} on {host}: {_listed(names)}" for rank, host, names in odd)
        raise ReplicaError(
            f"iteration {iteration}: weights differ from the weights of the other ranks that hold them: {ranks}",
            fix="the memory or a link of these GPUs may be faulty: leave out their hosts, and resume from the last checkpoint",
        )


def _numbers(engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each tensor of this rank by group of ranks that hold it: name of the group, name of the tensor, its number."""
    for bucket, weights in engine.data_parallel.gathered_buckets():
        replicas = "replicas" if bucket.family == "dense" else "expert_replicas"
        for param in bucket.params:
            flat = weights[param.start : param.stop]
            bits = flat.view(_INTEGERS[flat.element_size()])
            for piece, part in param.entry.layout.piece_ranges(0, flat.numel()):
                first = piece.row * (flat.numel() // param.entry.layout.shape[0])
                number = bits[first + part.start : first + part.stop].sum(dtype=torch.int64)
                for group in (replicas, *piece.copies):
                    if engine.grid.group(group).size > 1:
                        yield group, piece.name, number


def _odd_places(values: tuple[int, ...]) -> list[int]:
    """Return the places of all values but the most frequent one; of all, if no value is held by more than half."""
    (common, count), *_ = Counter(values).most_common(1)
    return [place for place, value in enumerate(values) if value != common or 2 * count <= len(values)]


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
