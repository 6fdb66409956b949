"""Point-to-point communication between adjacent virtual stages on different ranks.

    rank 0   F0 | send 0 ─────────┐     F1 ...              a message is transferred during other passes, if its
    rank 1   post 0, compute ...  └> receive 0 | F0         receive was posted before them

Every pair of ranks has a communicator per direction (`RankGrid.channels`): its messages are in the order of the schedule,
which the simulator checks, and wait for no others. Receives that are posted early therefore block no send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from megatrain.parallel.collectives import Transfer, begin_receive, begin_send
from megatrain.parallel.grid import Channel, RankGrid, RankGroup
from megatrain.parallel.pipeline.actions import Action, ActionKind, Placement
from megatrain.parallel.pipeline.schedule import RECEIVED_AS

_FORWARD: Final = (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD)
_SENDS: Final = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)


@dataclass(frozen=True)
class PointToPoint:
    """Sends and receives of one run of a schedule.

    At most as many sends are pending per channel as there are virtual stages: no schedule runs further ahead.
    """

    grid: RankGrid
    placement: Placement
    _sends: dict[Channel, deque[Transfer]] = field(default_factory=dict)
    """Pending sends, oldest first."""
    _posted: dict[Action, tuple[Transfer, Tensor]] = field(default_factory=dict)
    """Pending receives, with the tensors that they fill."""

    def send(self, action: Action, x: Tensor) -> None:
        """Begin to send to an adjacent virtual stage."""
        channel = self._channel(action)
        sends = self._sends.setdefault(channel, deque())
        group = self.grid.channels[channel]
        sends.append(begin_send(x.detach().contiguous(), group, step_to_peer(group)))
        if len(sends) > self.placement.num_stages:
            sends.popleft().wait()

    def post(self, action: Action, x: Tensor) -> None:
        """Begin to receive into `x`; `action` is a post, or a receive that is not posted earlier."""
        received = Action(RECEIVED_AS.get(action.kind, action.kind), action.microbatch, action.chunk)
        group = self.grid.channels[self._channel(received)]
        self._posted[received] = begin_receive(x, group, step_to_peer(group)), x

    def receive(self, action: Action, empty: Callable[[], Tensor]) -> Tensor:
        """Wait for a message and return it; begin to receive it into `empty()` unless it has been posted."""
        if action not in self._posted:
            self.post(action, empty())
        transfer, x = self._posted.pop(action)
        transfer.wait()
        return x

    def finish(self) -> None:
        """Wait for all sends."""
        assert not self._posted, f"posted and never received: {list(self._posted)}"
        for sends in self._sends.values():
            for transfer in sends:
                transfer.wait()

    def _channel(self, action: Action) -> Channel:
        """Return the channel of a send or a receive."""
        is_forward, sends = action.kind in _FORWARD, action.kind in _SENDS
        own = self.grid.pp.rank
        stage = self.placement.stage(own, action.chunk)
        peer = self.placement.rank(stage + (1 if is_forward == sends else -1))
        return Channel(own, peer, is_forward) if sends else Channel(peer, own, is_forward)


def connect_channels(grid: RankGrid, device: torch.device) -> None:
    """Send a number over each channel, in an order that is the same on all ranks.

    NCCL connects two ranks at their first message, and blocks both until the other one begins it: with posted receives
    the first step would deadlock.
    """
    for channel, group in grid.channels.items():
        if group.handle is None:
            continue  # no other rank runs
        x = torch.zeros(1, device=device)
        begin = begin_send if channel.sender == grid.pp.rank else begin_receive
        begin(x, group, step_to_peer(group)).wait()


def step_to_peer(group: RankGroup) -> int:
    """Return the distance to the other one of two ranks."""
    return 1 - 2 * group.rank
