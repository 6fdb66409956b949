"""What ranks say to each other, played by threads with a store of this process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from megatrain.parallel import messages
from megatrain.parallel.messages import Messages


def test_words_reach_rank_0_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_PART_BYTES", 7)
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def talk(rank: int) -> list[Any]:
        own = Messages(rank, 4, store)
        said = own.gather({"rank": rank, "text": "word " * rank})
        most = own.gather_and_broadcast(rank, max)
        return [said, most, own.share(["rank", rank] * 5), own.share(None), own.gather("")]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(talk, range(4))
    said = [{"rank": rank, "text": "word " * rank} for rank in range(4)]
    assert first == [said, 3, ["rank", 0] * 5, None, ["", "", "", ""]]
    assert others == [[[], 3, ["rank", 0] * 5, None, []]] * 3
    assert store.num_keys() == 0


def test_one_rank_needs_no_store() -> None:
    alone = Messages(0, 1, None)
    assert alone.gather((1, 2)) == [[1, 2]]
    assert alone.gather_and_broadcast(5, lambda found: found * 2) == [5, 5]
