"""Times of collectives, by size and place.

A process group has `size` ranks with `stride` between them. Consecutive ranks share nodes, so `gpus_per_node // stride` of
them are in one node. A ring crosses from node to node on all adapters of its members there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.tools.plan.hardware import Cluster


@dataclass(frozen=True)
class Group:
    """A process group and its place in the cluster."""

    cluster: Cluster
    size: int
    stride: int = 1

    @property
    def per_node(self) -> int:
        """Members in one node."""
        return max(1, min(self.size, self.cluster.gpus_per_node // self.stride))

    @property
    def is_in_node(self) -> bool:
        return self.per_node == self.size

    @property
    def rate(self) -> float:
        """Bytes per second of a ring through all members."""
        rates, cluster = self.cluster.rates, self.cluster
        inside = cluster.gpu.link_rate * rates.links
        if self.is_in_node:
            return inside
        return min(inside, self.per_node * cluster.network_rate * rates.network)

    @property
    def exposed(self) -> float:
        """Fraction of overlapped collectives that costs time all the same."""
        rates = self.cluster.rates
        return rates.tensor_exposed if self.is_in_node else rates.network_exposed

    @property
    def latency(self) -> float:
        """Seconds of a collective without data: NCCL's rings are as long as a node, and trees connect nodes."""
        rates = self.cluster.rates
        if self.is_in_node:
            return rates.link_seconds + rates.hop_seconds * (self.size - 1)
        nodes = self.size // self.per_node
        return rates.network_seconds + rates.hop_seconds * (self.per_node + 2 * math.log2(max(nodes, 2)))

    def all_gather(self, num_bytes: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `num_bytes`, all shards together."""
        if self.size == 1:
            return 0.0
        return self.latency + num_bytes * (self.size - 1) / self.size / self.rate

    def all_reduce(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes`."""
        return (
            0.0
            if self.size == 1
            else self.latency + 2 * (num_bytes * (self.size - 1) / self.size / self.rate)
        )

    def all_to_all(self, bytes_per_peer: float) -> float:
        """Return the seconds of an all-to-all of tokens; `bytes_per_peer`: of those that a rank sends to each other rank."""
        if self.size == 1:
            return 0.0
        rates, cluster = self.cluster.rates, self.cluster
        inside, outside = self.per_node - 1, (self.size - self.per_node) * bytes_per_peer
        return self.latency + max(
            inside * bytes_per_peer / (cluster.gpu.link_rate * rates.links * rates.all_to_all),
            outside / (cluster.network_rate * rates.network),
        )

    def forwarded(self, bytes_per_peer: float) -> float:
        """Return the seconds of an all-to-all within a node that follows one between nodes."""
        rate = self.cluster.gpu.link_rate * self.cluster.rates.forwarded
        return self.latency + (self.size - 1) * bytes_per_peer / rate

    def message(self, num_bytes: float) -> float:
        """Return the seconds of a message to the next member."""
        if self.size == 1:
            return 0.0
        rates, cluster = self.cluster.rates, self.cluster
        is_near = self.stride < cluster.gpus_per_node and self.is_in_node
        rate = cluster.gpu.link_rate * rates.messages if is_near else cluster.network_rate * rates.network
        return (rates.hop_seconds if is_near else rates.network_seconds) + num_bytes / rate
