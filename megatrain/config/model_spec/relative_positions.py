"""Relative position bias of T5: a learned number per head and bucket of distances, added to the scaled scores.

    distance = key - query      0 .. e - 1  a bucket each       e .. D  buckets of growing width      beyond D  the last one

Source: Raffel et al., arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RelativePositionSpec:
    """The table of a stack, which its layers share."""

    num_buckets: int
    max_distance: int
    """Distance from which all keys are in the last bucket."""
    is_bidirectional: bool
    """Half of the buckets are for keys after the query; else those are in the bucket of distance 0."""
