"""--overlap-moe-expert-parallel-comm: rows are sent while the layers of another micro-batch compute, and no bit changes."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
from everyday import one_in
from test_data_parallel import trained
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.parallel.expert_parallel import AllToAllDispatcher, RowTransfer
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.tools.worker_pool import WorkerPool


@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero2 overlap deepseek ep2 uniform",
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in (
                "dp2 pp2 dualpipev zero1 overlap mixtral ep2 alltoall batch16",
                "dp2 zero1 overlap deepseek ep2 alltoall",
                "dp2 zero3 overlap latentexperts ep2 alltoall",
                "dp2 pp2 interleaved zero3 overlap mixtral ep2 batch16",
            )
        ),
    ],
)
def test_passes_in_turn_change_no_bit(pool: WorkerPool, layout: str) -> None:
    in_turn = Layout.of(f"{layout} moeoverlap")
    found = pool.run(in_turn.world_size, trained, in_turn, ())
    expected = pool.run(in_turn.world_size, trained, in_turn.but("moewaits"), ())
    for (numbers, state), (others, other_state) in zip(found, expected, strict=True):
        assert numbers == others
        assert all(np.array_equal(a, b) for a, b in zip(state, other_state, strict=True))


Event = tuple[bool, str, int]
"""The forward pass did it or not; `product`, `begin` or `end`; the number of the transfer."""


class Events(TorchDispatchMode):
    """The products of each pass, and the begins and ends of the transfers that give up a turn, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Event] = []
        self._transfers: list[object] = []

    def add(self, name: str, transfer: object = None) -> None:
        number = -1
        if transfer is not None:
            if transfer not in self._transfers:
                self._transfers.append(transfer)
            number = self._transfers.index(transfer)
        is_forward = threading.current_thread() is threading.main_thread()
        self.found.append((is_forward, name, number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.add("product")
        return func(*args, **(kwargs or {}))


def events_of(rank: int, world_size: int, layout: Layout) -> list[Event]:
    """Run the passes of a step; return its events."""
    engine = engine_of(tiny_plan(layout, world_size), rank)
    start, wait, events = RowTransfer.start, RowTransfer.wait, Events()
    all_to_all = AllToAllDispatcher._all_to_all

    def recorded_start(self: RowTransfer, *arguments: Any) -> Tensor:
        if self.give_turn is not None:
            events.add("begin", self)
        return start(self, *arguments)

    def recorded_wait(self: RowTransfer) -> None:
        wait(self)
        if self.give_turn is not None:
            events.add("end", self)

    def recorded_all_to_all(*arguments: Any) -> Tensor:
        transfer = object()
        events.add("begin", transfer)
        rows = all_to_all(*arguments)
        events.add("end", transfer)
        return rows

    with (
        mock.patch.multiple(RowTransfer, start=recorded_start, wait=recorded_wait),
        mock.patch.object(AllToAllDispatcher, "_all_to_all", recorded_all_to_all),
        events,
    ):
        engine.accumulate_gradients(list(local_batches(0, layout, engine.grid.dp.rank)))
    return events.found


def overlaps(events: list[Event], begin: int) -> bool:
    """Return whether the other pass multiplies between this begin of a transfer and its end."""
    is_forward, _, number = events[begin]
    end = events.index((is_forward, "end", number), begin)
    return (not is_forward, "product", -1) in events[begin:end]


@pytest.mark.parametrize("dispatcher", one_in(2, ["alltoall", "alltokens"]))
def test_rows_are_sent_while_the_other_pass_computes(pool: WorkerPool, dispatcher: str) -> None:
    """Three micro-batches make two combined actions, in which all four transfers of the four layers overlap."""
    layout = Layout.of(f"dp2 mixtral ep2 {dispatcher} moeoverlap batch12")
    found = pool.run(2, events_of, layout)
    orders = [[event for event in events if event[1] != "product"] for events in found]
    assert orders[0] == orders[1], "ranks begin and end all transfers in one order"
    begins = [number for number, (_, name, _) in enumerate(found[0]) if name == "begin"]
    assert len(begins) == 3 * 4 * 4
    assert sum(overlaps(found[0], begin) for begin in begins) == 2 * 4 * 4
