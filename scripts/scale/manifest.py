"""Work of rank 0 for the manifest of a save, and of a rank for that of a load: `python scripts/scale/manifest.py --ranks 1024 16384`.

Each rank has 71 chunks of 64 tensors, as of a model of 405 billion parameters on 16,384 ranks. `whole` is a manifest of one file, which
checkpoints of up to 64 ranks have; it is left out where it would exceed --most-whole. Bytes are of JSON; seconds are of one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.checkpoint import manifest, parts
from megatrain.checkpoint.manifest import MANIFEST_NAME, encode, read_root
from megatrain.checkpoint.save import merge_reports
from megatrain.storage.disk import Disk

ROWS, CHUNKS, RANKS_OF_TENSOR = 64, 71, 16
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def reports_of(rank: int) -> list[dict[str, Any]]:
    """Return the report of a rank: row blocks of tensors that it shares with the ranks of its group."""
    group, place = divmod(rank, RANKS_OF_TENSOR)
    rows = []
    for number in range(CHUNKS):
        kind, name = KINDS[number % 3], f"decoder.layers.{group}.part_{number // 3}.weight"
        if number // 3 == CHUNKS // 3:
            continue  # the last tensor lacks a kind
        box = ((place * ROWS, (place + 1) * ROWS), (0, 1024))
        key = f"{kind}/{name}/{box[0][0]}-{box[0][1]},0-1024"
        rows.append((name, (RANKS_OF_TENSOR * ROWS, 1024), kind, "F32", key, box, "0123abcd"))
    file = {"num_bytes": 297_000_000, "header_crc32": rank}
    return [{"name": f"shard_{rank:05d}.safetensors", "file": file, "chunks": rows}]


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work`, and its processor time."""
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


def main() -> None:
    """Print a line of JSON for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384], help="multiples of 16")
    parser.add_argument("--most-whole", type=int, default=1024, help="ranks of the largest whole manifest")
    arguments = parser.parse_args()
    # State and configuration are empty.
    manifest.check_stored_values = parts.check_kinds = lambda *_: None  # type: ignore[attr-defined]
    contents: dict[str, Any] = {"iteration": 1, "consumed_train_samples": 8, "optimizer_step_count": 1}
    contents |= {"state": {"has_optimizer": True}, "config": {}}
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as name:
            print(
                json.dumps(
                    {"ranks": size} | measured(Path(name), size, contents, size <= arguments.most_whole)
                )
            )


def measured(folder: Path, size: int, contents: dict[str, Any], has_whole: bool) -> dict[str, float]:
    """Return bytes and seconds of both formats."""
    found: dict[str, float] = {}
    if has_whole:
        reports = [reports_of(rank) for rank in range(size)]
        text = json.dumps(reports)
        whole, merge_seconds = timed(lambda: encode(merge_reports(json.loads(text), **contents)))
        found |= {"whole: gathered": len(text), "whole: manifest": len(whole), "whole: save": merge_seconds}
    lines = [parts.write_part(folder, rank, reports_of(rank), _Unsynced()) for rank in range(size)]
    _, found["parts: one rank's save"] = timed(lambda: parts.tensors_of(reports_of(1)))
    text = json.dumps(lines)
    root, found["parts: save"] = timed(lambda: encode(parts.merge_parts(json.loads(text), **contents)))
    (folder / MANIFEST_NAME).write_bytes(root)
    opened, found["parts: root of a load"] = timed(lambda: read_root(folder))
    _, found["parts: own part of a load"] = timed(lambda: parts.read_part(folder, parts.part_name(1), opened))
    if has_whole:
        _, found["whole: load"] = timed(lambda: parts.read_manifest(folder))
    found |= {"parts: gathered": len(text), "parts: root": len(root)}
    return {name: round(value, 4) for name, value in found.items()}


class _Unsynced(Disk):
    """Does not wait for the disk."""

    def sync(self, file: Any) -> None:
        """Do nothing."""


if __name__ == "__main__":
    main()
