"""Time of rank 0 for one gather over real sockets: `python scripts/scale/messages.py --ranks 16384 --bytes 100`.

The values of the others are in the store before it begins. `one by one` asks three times for each rank, as `Messages` did once; `tree` is
what it does: rank 0 reads the entries of the ranks that collect those of others. The time of such a rank is `collector`.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta

import torch.distributed as dist

from megatrain.parallel.messages import FAN_IN, Messages


def main() -> None:
    """Print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--bytes", type=int, default=100, help="of the value of a rank")
    arguments = parser.parse_args()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    value, size = json.dumps("x" * arguments.bytes), arguments.ranks
    found: dict[str, float] = {"ranks": size, "bytes": arguments.bytes}
    for rank in range(1, size):
        store.set(f"old/{rank}", f"1 {value}")
    start = time.monotonic()
    for rank in range(1, size):
        store.get(f"old/{rank}")
        store.get(f"old/{rank}")
        store.delete_key(f"old/{rank}")
    found["one by one"] = time.monotonic() - start
    collector = FAN_IN if size > FAN_IN else 0
    for rank in range(collector + 1, min(collector + FAN_IN, size)):
        store.set(f"1/{rank}", f"1 {value}")
    start = time.monotonic()
    Messages(collector, size, store).gather("x" * arguments.bytes)
    found["collector"] = time.monotonic() - start
    for rank in range(1, min(FAN_IN, size)):
        store.set(f"1/{rank}", f"1 {value}")
    for rank in range(2 * FAN_IN, size, FAN_IN):
        Messages(rank, size, store)._put(f"1/{rank}", ",".join([value] * min(FAN_IN, size - rank)))  # noqa: SLF001
    start = time.monotonic()
    assert len(Messages(0, size, store).gather("x" * arguments.bytes)) == size
    found["tree"] = time.monotonic() - start
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
