"""Messages between ranks; threads with a store of this process stand in for the ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore

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
