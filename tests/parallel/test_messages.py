"""Messages between ranks; threads with a store of this process stand in for the ranks."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from megatrain.parallel import messages
from megatrain.parallel.messages import Messages


def test_values_reach_rank_0_and_its_answers_all_ranks() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def exchange(rank: int) -> list[Any]:
        own = Messages(rank, 4, store, part_bytes=7)
        gathered = own.gather({"rank": rank, "text": "word " * rank})
        largest = own.gather_and_broadcast(rank, max)
        sent = [own.broadcast(["rank", rank] * 5), own.broadcast(None)]
        return [gathered, largest, *sent, own.gather("")]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(exchange, range(4))
    gathered = [{"rank": rank, "text": "word " * rank} for rank in range(4)]
    assert first == [gathered, 3, ["rank", 0] * 5, None, ["", "", "", ""]]
    assert others == [[[], 3, ["rank", 0] * 5, None, []]] * 3
    assert store.num_keys() == 0


def test_one_rank_needs_no_store() -> None:
    alone = Messages(0, 1, None)
    assert alone.gather((1, 2)) == [[1, 2]]
    assert alone.gather_and_broadcast(5, lambda found: found * 2) == [5, 5]


class CountingStore:
    """A store of this process that counts the round trips of one rank."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.counts = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


@pytest.mark.parametrize("size", [3, 4, 5, 9, 40, 64, 65])
def test_rank_0_reads_few_entries_of_many_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values come in rank order through a tree; a rank waits once for each level."""
    monkeypatch.setattr(messages, "FAN_IN", 4)
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    stores = [CountingStore(store) for _ in range(size)]
    found = [
        Messages(rank, size, stores[rank], part_bytes=9).gather(f"rank {rank}")
        for rank in reversed(range(size))
    ]
    assert found == [[]] * (size - 1) + [[f"rank {rank}" for rank in range(size)]]
    assert store.num_keys() == 0
    levels = next(level for level in range(1, 9) if 4**level >= size)
    assert (
        max(one.counts["multi_get"] for one in stores) <= levels * 4
    )  # once for all, once for the rest of each
    assert max(one.counts["delete_key"] for one in stores) < 6 * size


def test_a_rank_waits_as_long_as_another_one_announces_progress() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    noticed: list[None] = []

    def wait() -> Any:
        waiting = Messages(1, 2, store)
        waiting.on_progress = lambda: noticed.append(None)
        return waiting.broadcast(None)

    with ThreadPoolExecutor(1) as pool:
        answer, working = pool.submit(wait), Messages(0, 2, store)
        for _ in range(8):
            time.sleep(0.2)
            working.announce_progress()
        working.broadcast("built")
        assert answer.result() == "built"
    assert noticed
    with pytest.raises(DistStoreError):
        Messages(1, 2, store).gather_and_broadcast(None, len)
