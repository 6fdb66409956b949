"""Actions of a pipeline schedule, and the ranks of its virtual stages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """The kind of an action; posts, sends and receives name the direction of the data."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    FORWARD_BACKWARD = "FB"
    """A forward pass of one micro-batch and a backward pass of another, segment by segment in turn."""
    SEND_FORWARD = "sf"
    SEND_BACKWARD = "sb"
    POST_FORWARD = "pf"
    """Begin to receive."""
    POST_BACKWARD = "pb"
    RECV_FORWARD = "rf"
    """Wait for the message; begin to receive it unless it has been posted."""
    RECV_BACKWARD = "rb"


@dataclass(frozen=True)
class Action:
    """One action of a rank for one micro-batch of one model chunk."""

    kind: ActionKind
    microbatch: int
    chunk: int = 0
    backward: Action | None = None
    """The backward pass of a FORWARD_BACKWARD action; the other fields are those of its forward pass."""

    @property
    def passes(self) -> tuple[Action, ...]:
        """The passes of this action: one, two if it is a FORWARD_BACKWARD, none for messages."""
        if self.backward is not None:
            return Action(ActionKind.FORWARD, self.microbatch, self.chunk), self.backward
        return (self,) if self.kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT) else ()


def combined(forward: Action, backward: Action) -> Action:
    """Return the action that runs a forward and a backward pass together."""
    return Action(ActionKind.FORWARD_BACKWARD, forward.microbatch, forward.chunk, backward)


@dataclass(frozen=True)
class Placement:
    """The ranks of a pipeline's virtual stages. Each stage is one model chunk of its rank.

    num_ranks 4, num_chunks 2    rank      0  1  2  3                  is_v    0  1  2  3
                                 chunk 0   0  1  2  3  virtual stages          0  1  2  3
                                 chunk 1   4  5  6  7                          7  6  5  4
    """

    num_ranks: int
    num_chunks: int = 1
    """Model chunks of each rank."""
    is_v: bool = False
    """Two chunks; the second ones are in reverse order, so that the first rank has the first and the last stage."""

    @property
    def num_stages(self) -> int:
        """Number of virtual stages."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the virtual stage of a rank's chunk."""
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if self.is_v and chunk else rank)

    def rank(self, stage: int) -> int:
        """Return the rank of a virtual stage."""
        chunk, index = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - index if self.is_v and chunk else index

    @property
    def adjacent_ranks(self) -> list[tuple[int, int]]:
        """Different ranks of adjacent virtual stages: the earlier stage's rank first, each pair once."""
        ranks = [self.rank(stage) for stage in range(self.num_stages)]
        return list(dict.fromkeys(pair for pair in itertools.pairwise(ranks) if pair[0] != pair[1]))

    def has_head(self, rank: int) -> bool:
        """Return whether a rank has the last virtual stage."""
        return self.rank(self.num_stages - 1) == rank
