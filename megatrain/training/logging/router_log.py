"""What a run shows of its routers: an entry of `metrics.jsonl`, a line of the log, curves.

experts | largest load: 1.31 x mean (layer 5) | dropped: 0.00 % | router entropy: 1.94 (layer 3) to 2.05
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatrain.training.routers import RouterReport


def router_values(report: RouterReport | None) -> dict[str, Any] | None:
    """What `metrics.jsonl` gets under `routers`; None without routers."""
    if report is None:
        return None
    return {"losses": dict(report.losses), "layers": [asdict(layer) for layer in report.layers]}


def health_line(values: Mapping[str, Any]) -> str:
    """What loads are like, of `router_values`: the extremes, with their layers."""
    layers = values["layers"]
    busiest = max(layers, key=lambda layer: layer["max_load"])
    surest, most = (pick(layers, key=lambda layer: layer["entropy"]) for pick in (min, max))
    dropped = sum(layer["dropped"] for layer in layers) / len(layers)
    return (
        f" experts | largest load: {busiest['max_load']:.2f} x mean (layer {busiest['layer']})"
        f" | dropped: {100 * dropped:.2f} %"
        f" | router entropy: {surest['entropy']:.3f} (layer {surest['layer']}) to {most['entropy']:.3f} |"
    )
