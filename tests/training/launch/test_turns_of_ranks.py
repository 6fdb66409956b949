"""Ranks map cached indices at once, and share the building of what is missing."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from megatrain.config.errors import ConfigError
from megatrain.data.samples.build import SplitDatasets
from megatrain.data.samples.index_cache import EVERYTHING, Arrays, IndexCache, Share, all_built
from megatrain.parallel.messages import Messages
from megatrain.parallel.rank_lists import GridShape
from megatrain.training import batches

HOSTS, RANKS_OF_HOST = 2, 2
SIZE = HOSTS * RANKS_OF_HOST
NUM_INDICES = 12


class Caches:
    """Caches of all hosts, and who has built what."""

    def __init__(self, folder: Path, *, is_shared: bool, is_warm: bool) -> None:
        self.folder, self.is_shared, self.built = folder, is_shared, Counter[int]()
        if is_warm:
            for rank in range(SIZE):
                self.get(rank, EVERYTHING)
            self.built.clear()

    def get(self, rank: int, share: Share) -> SplitDatasets:
        """Build indices, and an index of them all, as that of a blend."""
        host = 0 if self.is_shared else rank // RANKS_OF_HOST
        cache = IndexCache(self.folder / f"host_{host}", share=share)
        names = [f"dataset {number}" for number in range(NUM_INDICES)]
        all_built(partial(self._build, cache, rank, "gpt", name) for name in names)
        self._build(cache, rank, "blend", "blend")
        return SplitDatasets(None, None, None)

    def _build(self, cache: IndexCache, rank: int, kind: str, name: str) -> None:
        def build() -> Arrays:
            self.built[rank] += 1
            return {"order": np.arange(4)}

        cache.get_or_build(kind, {"name": name}, build)


def start(monkeypatch: pytest.MonkeyPatch, caches: Caches) -> list[Any]:
    """Build on all ranks; return the messages that each has exchanged, or its error."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))
    own = threading.local()
    monkeypatch.setattr(
        batches,
        "build_samples",
        lambda *_, share, **__: caches.get(own.rank, share),
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
    monkeypatch.setattr(batches, "grid_shape", lambda _: GridShape(dp=SIZE))
    facts = SimpleNamespace(ranks_per_node=RANKS_OF_HOST)

    def run(rank: int) -> Any:
        own.rank = rank
        messages = Messages(rank, SIZE, store)
        grid = SimpleNamespace(
            messages=messages, pp=SimpleNamespace(rank=0), world=SimpleNamespace(size=SIZE), rank=rank
        )
        ranks: Any = SimpleNamespace(
            grid=grid, is_main=rank == 0, local_rank=rank % RANKS_OF_HOST, watch=None, facts=facts
        )
        try:
            splits, _ = batches._build_in_turns(ranks, plan, print)
        except ConfigError as error:
            return error
        assert splits is not None
        return messages.count

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_warm_start_takes_one_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shared: bool
) -> None:
    """A turn is a gather and a broadcast."""
    caches = Caches(tmp_path, is_shared=is_shared, is_warm=True)
    assert start(monkeypatch, caches) == [2] * SIZE
    assert not caches.built


@pytest.mark.parametrize(("is_shared", "most", "num_built"), [(True, 4, 13), (False, 8, 26)])
def test_ranks_share_a_cold_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_shared: bool, most: int, num_built: int
) -> None:
    """On a shared disk each index is built once, on disks of their own once on each host, and each rank builds its part."""
    caches = Caches(tmp_path, is_shared=is_shared, is_warm=False)
    counts = start(monkeypatch, caches)
    assert len(set(counts)) == 1
    assert caches.built.total() == num_built
    assert all(NUM_INDICES // SIZE <= caches.built[rank] <= most for rank in range(SIZE))
