"""Reuse of cached indices: a run reads the index of its own data and settings, or builds it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from damaged_pairs import VOCAB, write_pair
from everyday import nightly

from megatrain.config.derive.datasets import Blend
from megatrain.config.errors import InputError
from megatrain.data.samples import index_cache
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.gpt_index import build_index
from megatrain.data.samples.index_cache import IndexCache
from megatrain.data.samples.sources import content_digest, open_token_ids

pytestmark = pytest.mark.usefixtures("ends_soon")

ROOT = Path(__file__).parents[3]
LENGTHS = np.random.default_rng(3).integers(0, 30, 200, dtype=np.int32)
SETTINGS = {"seq_length": 16, "seed": 5, "num_samples": 400}
NAMES = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """`build_index` with a cache that also stores small indices."""
    monkeypatch.setattr(index_cache, "WORTH_ROWS", 0)
    logged = []

    def build(lengths=LENGTHS, part=None, folder=tmp_path / "cache", **changed):
        part = part or range(len(lengths))
        return build_index(lengths, part, **(SETTINGS | changed), cache=IndexCache(folder, logged.append))

    build.logged = logged
    build.folder = tmp_path / "cache"
    return build


def check_equal(found, expected):
    assert found.epochs == expected.epochs
    for name in NAMES:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), name


def plain(lengths=LENGTHS, part=None, **changed):
    return build_index(lengths, part or range(len(lengths)), **(SETTINGS | changed))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_samples": None},
        {"num_samples": 1},
        {"num_samples": 1000},
        {"part": range(20, 90)},
        {"lengths": np.full(9, 1000, np.int32)},
    ],
    ids=str,
)
def test_a_cached_index_equals_an_uncached_one(cached, changed):
    for _ in range(2):
        check_equal(cached(**changed), plain(**changed))
    assert len(list(cached.folder.iterdir())) == 1
    assert not cached.logged


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 6},
        {"seq_length": 17},
        {"part": range(199)},
        {"part": range(1, 200)},
        {"lengths": LENGTHS[::-1].copy()},
        {"lengths": np.concatenate((LENGTHS[:-1], LENGTHS[-1:] + 1))},
        {"num_samples": 800},
        {"num_samples": 520},
        {"num_samples": None},
    ],
    ids=["seed", "seq_length", "range end", "range start", "order of lengths", "a length", "epochs", "separate last epoch",
         "one epoch"],
)  # fmt: skip
def test_every_setting_of_an_index_is_in_its_key(cached, changed):
    check_equal(cached(), plain())
    check_equal(cached(**changed), plain(**changed))
    assert len(list(cached.folder.iterdir())) == 2


def test_equal_numbers_of_epochs_share_a_file(cached):
    for num_samples in (380, 381, 400):
        assert plain(num_samples=num_samples).epochs == plain().epochs
        check_equal(cached(num_samples=num_samples), plain())
    assert len(list(cached.folder.iterdir())) == 1


def test_small_indices_are_not_cached(cached, monkeypatch):
    monkeypatch.undo()
    check_equal(cached(), plain())
    assert not cached.folder.exists()


RACER = """
import sys
import numpy as np
from megatrain.data.samples import index_cache
from megatrain.data.samples.gpt_index import build_index

index_cache.WORTH_ROWS = 0
lengths = np.random.default_rng(3).integers(0, 30, 200, dtype=np.int32)
cache = index_cache.IndexCache(sys.argv[1], lambda line: print("logged", line, flush=True))
print("ready", flush=True)
for line in sys.stdin:
    index = build_index(lengths, range(200), seq_length=16, seed=int(line), num_samples=400, cache=cache)
    arrays = (index.document_index, index.sample_index, index.shuffle_index)
    print(" ".join(index_cache.digest(array) for array in arrays), flush=True)
"""


@pytest.mark.parametrize("num_races", [10, nightly(100)])
def test_two_jobs_may_build_the_same_index(tmp_path, num_races):
    """Each seed is a race: both processes find no file, build the index and store it."""
    command = [sys.executable, "-c", RACER, str(tmp_path / "cache")]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for seed in range(num_races):
        for racer in racers:
            racer.stdin.write(f"{seed}\n")
            racer.stdin.flush()
        index = plain(seed=seed)
        expected = " ".join(index_cache.digest(getattr(index, name)) for name in NAMES)
        assert [racer.stdout.readline() for racer in racers] == [f"{expected}\n"] * 2
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".index"] * num_races


def blended(prefixes, folder, weights=(0.3, 0.7), num_samples=60, **options):
    sample_options = SampleOptions(seq_length=8, eod=0, vocab_size=VOCAB)
    builder = SplitBuilder(sample_options, cache_folder=folder, **options)
    blend = Blend(tuple(map(str, prefixes)), weights)
    plans = SamplePlans(train=(num_samples,), valid=(0,), test=(0,), seed=1)
    return builder.build({"all": blend}, "1,0,0", plans).train


def tokens(samples):
    return [samples[k].tokens.tolist() for k in range(len(samples))]


@pytest.fixture
def prefixes(tmp_path):
    return [write_pair(tmp_path / "a", seed=1), write_pair(tmp_path / "b", seed=2)]


def test_a_cached_blend_equals_an_uncached_one(cached, prefixes, tmp_path):
    expected = tokens(blended(prefixes, None))
    for _ in range(2):
        assert tokens(blended(prefixes, tmp_path / "cache")) == expected
    kinds = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir())
    assert kinds == ["blend", "gpt", "gpt"]


def test_a_large_index_is_announced_when_it_is_built(cached, prefixes, tmp_path, monkeypatch):
    monkeypatch.setattr("megatrain.data.samples.build._MANY_ROWS", 1)
    said = []
    for _ in range(2):
        blended(prefixes, tmp_path / "cache", log=said.append)
    assert [line.split(" of ")[0] for line in said] == ["building the index"] * 2, said


@pytest.mark.parametrize(
    "changed",
    [{"weights": (0.7, 0.3)}, {"weights": (0.3, 0.69)}, {"weights": None}, {"num_samples": 50}],
    ids=["weights swapped", "a weight", "by size", "samples"],
)
def test_every_setting_of_a_blend_is_in_its_key(cached, prefixes, tmp_path, changed):
    def blends():
        return sorted((tmp_path / "cache").glob("blend-*"))

    blended(prefixes, tmp_path / "cache")
    before = blends()
    assert tokens(blended(prefixes, tmp_path / "cache", **changed)) == tokens(
        blended(prefixes, None, **changed)
    )
    assert len(blends()) == len(before) + 1


def test_a_node_without_a_shared_disk_builds_its_own_index(cached, prefixes, tmp_path):
    """Rank 0 stores its indices on a disk that rank 1 does not see."""
    here, there = tmp_path / "node 0", tmp_path / "node 1"
    expected = tokens(blended(prefixes, here))
    logged = []
    assert tokens(blended(prefixes, there, log=logged.append)) == expected
    assert not logged
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in names)


def test_a_node_with_other_files_is_an_error(prefixes, tmp_path):
    """Rank 0 gathers the facts for all; a host with an older copy would silently read other samples."""
    digests = {str(prefix): content_digest(open_token_ids(str(prefix))) for prefix in prefixes}
    expected = tokens(blended(prefixes, None))
    assert tokens(blended(prefixes, None, digests=digests)) == expected
    write_pair(prefixes[1], seed=9)
    with pytest.raises(InputError, match=r"b\.bin: .*rank 0.*\n  fix: give all hosts"):
        blended(prefixes, None, digests=digests)
