"""Ranks read cached indices at once, and build what is missing in turns."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatrain.config.errors import ConfigError
from megatrain.data.samples.build import SplitDatasets
from megatrain.data.samples.index_cache import NotCachedError
from megatrain.parallel.messages import Messages
from megatrain.training import batches

HOSTS, RANKS_OF_HOST = 2, 2
SIZE = HOSTS * RANKS_OF_HOST


class Caches:
    """Caches of all hosts, and who has built what."""

    def __init__(self, *, is_shared: bool, is_warm: bool) -> None:
        self.is_shared, self.built = is_shared, list[int]()
        self.full = set(range(HOSTS)) if is_warm else set[int]()
        self.lock = threading.Lock()

    def get(self, rank: int, *, builds: bool) -> SplitDatasets:
        with self.lock:
            host = 0 if self.is_shared else rank // RANKS_OF_HOST
            if host not in self.full:
                if not builds:
                    raise NotCachedError
                self.built.append(rank)
                self.full.add(host)
        return SplitDatasets(None, None, None)


def start(monkeypatch: pytest.MonkeyPatch, caches: Caches) -> list[Any]:
    """Build on all ranks; return the messages that each has exchanged, or its error."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    own = threading.local()
    monkeypatch.setattr(
        batches,
        "build_samples",
        lambda *_, builds, **__: caches.get(own.rank, builds=builds),
    )
    monkeypatch.setattr(
        batches,
        "build_pipeline",
        lambda _: SimpleNamespace(placement=SimpleNamespace(has_head=lambda _: True)),
    )
    monkeypatch.setattr(batches, "embedding_ranks", lambda *_, **__: ())
    monkeypatch.setattr(batches, "first_digests", lambda _: [])
    config = SimpleNamespace(
        data=SimpleNamespace(data_cache_path="cache", dataset=None, image_data_path=(), has_documents=False),
        model=SimpleNamespace(model_family="gpt"),
    )
    plan: Any = SimpleNamespace(
        config=config,
        later_embedding_stage=None,
        derived=SimpleNamespace(startup_timeout_seconds=3600),
    )

    def run(rank: int) -> Any:
        own.rank = rank
        messages = Messages(rank, SIZE, store)
        grid = SimpleNamespace(
            messages=messages, pp=SimpleNamespace(rank=0), world=SimpleNamespace(size=SIZE), rank=rank
        )
        ranks: Any = SimpleNamespace(
            grid=grid, is_main=rank == 0, local_rank=rank % RANKS_OF_HOST, watch=None, facts=None
        )
        try:
            splits, _ = batches._build_in_turns(ranks, plan, print)
        except ConfigError as error:
            return error
        assert splits is not None
        return messages.count

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


@pytest.mark.parametrize(
    ("is_shared", "is_warm", "num_turns", "built"),
    [(True, True, 1, []), (False, True, 1, []), (True, False, 2, [0]), (False, False, 3, [0, 2])],
)
def test_a_warm_start_takes_one_turn(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool, is_warm: bool, num_turns: int, built: list[int]
) -> None:
    """A turn is a gather and a broadcast. On disks of their own, the first rank of each host builds."""
    caches = Caches(is_shared=is_shared, is_warm=is_warm)
    counts = start(monkeypatch, caches)
    assert caches.built == built
    # A rank that asks after rank 0 has built on a shared disk needs no second turn.
    assert set(counts) <= {2 * turns for turns in range(1, num_turns + 1)}
    assert len(set(counts)) == 1
