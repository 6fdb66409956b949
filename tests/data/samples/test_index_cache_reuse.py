"""The named cases of cached sample indices: a run reads the index of its own data and settings, or makes it anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from damaged_pairs import VOCAB, write_pair

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
    """`build_index` with a cache that also keeps what is small."""
    monkeypatch.setattr(index_cache, "WORTH_ROWS", 0)
    said = []

    def build(lengths=LENGTHS, part=None, folder=tmp_path / "cache", **changed):
        part = part or range(len(lengths))
        return build_index(lengths, part, **(SETTINGS | changed), cache=IndexCache(folder, said.append))

    build.said = said
    build.folder = tmp_path / "cache"
    return build


def check_equal(found, expected):
    assert found.epochs == expected.epochs
    for name in NAMES:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), name


def plain(lengths=LENGTHS, part=None, **changed):
    return build_index(lengths, part or range(len(lengths)), **(SETTINGS | changed))


def only_file(folder):
    (file,) = folder.iterdir()
    return file


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
def test_the_cached_index_is_the_uncached_one(cached, changed):
    for _ in range(2):
        check_equal(cached(**changed), plain(**changed))
    assert len(list(cached.folder.iterdir())) == 1
    assert not cached.said


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
    ids=["seed", "seq_length", "range end", "range start", "order of lengths", "a length", "epochs", "last epoch apart",
         "one epoch"],
)  # fmt: skip
def test_what_an_index_depends_on_is_in_its_key(cached, changed):
    check_equal(cached(), plain())
    check_equal(cached(**changed), plain(**changed))
    assert len(list(cached.folder.iterdir())) == 2


def test_as_many_epochs_are_the_same_file(cached):
    for num_samples in (380, 381, 400):
        assert plain(num_samples=num_samples).epochs == plain().epochs
        check_equal(cached(num_samples=num_samples), plain())
    assert len(list(cached.folder.iterdir())) == 1


def test_small_indices_are_not_kept(cached, monkeypatch):
    monkeypatch.undo()
    check_equal(cached(), plain())
    assert not cached.folder.exists()


def check_made_anew(cached, words):
    check_equal(cached(), plain())
    (line,) = cached.said
    assert f"{only_file(cached.folder)}: not used, and made anew: {words}" in line
    cached.said.clear()
    check_equal(cached(), plain())
    assert not cached.said, "it was put right"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated(cached, share):
    cached()
    file = only_file(cached.folder)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    check_made_anew(cached, "it ")


@pytest.mark.parametrize(
    "changed", [{"seed": 6}, {"lengths": LENGTHS[::-1].copy()}], ids=["of other seed", "of another dataset"]
)
def test_a_file_of_something_else(cached, tmp_path, changed):
    cached()
    cached(**changed, folder=tmp_path / "other")
    only_file(cached.folder).write_bytes(only_file(tmp_path / "other").read_bytes())
    check_made_anew(cached, "it belongs to other data or settings")


def test_half_written_by_a_killed_job(cached):
    """As a file system without atomic renames may leave it: a part beside the place, and a shorter one in it."""
    cached()
    file = only_file(cached.folder)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 3])
    partial = file.with_name(f"{file.name}.host.1.partial")
    partial.write_bytes(content[: len(content) // 2])
    check_equal(cached(), plain())
    assert file.read_bytes() == content
    assert len(cached.said) == 1


def test_each_flipped_byte_is_seen_or_does_not_matter(cached):
    cached()
    file = only_file(cached.folder)
    content = file.read_bytes()
    expected = plain()
    sample = np.random.default_rng(0).integers(0, len(content), 200).tolist()
    for position in [*range(64), *sample]:
        flipped = bytearray(content)
        flipped[position] ^= 0x10
        file.write_bytes(flipped)
        check_equal(cached(), expected)
        file.write_bytes(content)


def test_a_folder_that_cannot_be_written(cached, tmp_path):
    (tmp_path / "file").write_text("")
    check_equal(cached(folder=tmp_path / "file" / "cache"), plain())
    assert "sample indices cannot be kept here" in cached.said[-1]


RACER = """
import sys
import numpy as np
from megatrain.data.samples import index_cache
from megatrain.data.samples.gpt_index import build_index

index_cache.WORTH_ROWS = 0
lengths = np.random.default_rng(3).integers(0, 30, 200, dtype=np.int32)
cache = index_cache.IndexCache(sys.argv[1], lambda line: print("said", line, flush=True))
print("ready", flush=True)
for line in sys.stdin:
    index = build_index(lengths, range(200), seq_length=16, seed=int(line), num_samples=400, cache=cache)
    arrays = (index.document_index, index.sample_index, index.shuffle_index)
    print(" ".join(index_cache.digest(array) for array in arrays), flush=True)
"""


def test_two_jobs_at_once(tmp_path):
    """Each seed is a race: both start on the same line of input, find nothing, make the index and leave it."""
    command = [sys.executable, "-c", RACER, str(tmp_path / "cache")]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for seed in range(60):
        for racer in racers:
            racer.stdin.write(f"{seed}\n")
            racer.stdin.flush()
        index = plain(seed=seed)
        expected = " ".join(index_cache.digest(getattr(index, name)) for name in NAMES)
        assert [racer.stdout.readline() for racer in racers] == [f"{expected}\n"] * 2
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".index"] * 60


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


def test_a_cached_blend_is_the_uncached_one(cached, prefixes, tmp_path):
    expected = tokens(blended(prefixes, None))
    for _ in range(2):
        assert tokens(blended(prefixes, tmp_path / "cache")) == expected
    kinds = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache").iterdir())
    assert kinds == ["blend", "gpt", "gpt"]


@pytest.mark.parametrize(
    "changed",
    [{"weights": (0.7, 0.3)}, {"weights": (0.3, 0.69)}, {"weights": None}, {"num_samples": 50}],
    ids=["weights swapped", "a weight", "by size", "samples"],
)
def test_what_a_blend_depends_on_is_in_its_key(cached, prefixes, tmp_path, changed):
    def blends():
        return sorted((tmp_path / "cache").glob("blend-*"))

    blended(prefixes, tmp_path / "cache")
    before = blends()
    assert tokens(blended(prefixes, tmp_path / "cache", **changed)) == tokens(
        blended(prefixes, None, **changed)
    )
    assert len(blends()) == len(before) + 1


def test_a_node_without_shared_disk_makes_its_own(cached, prefixes, tmp_path):
    """Rank 0 leaves its indices on a disk that rank 1 does not see."""
    here, there = tmp_path / "node 0", tmp_path / "node 1"
    expected = tokens(blended(prefixes, here))
    said = []
    assert tokens(blended(prefixes, there, log=said.append)) == expected
    assert not said
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in there.iterdir()) == names
    assert all((here / name).read_bytes() == (there / name).read_bytes() for name in names)


def test_a_node_with_other_files_is_refused(prefixes, tmp_path):
    """Rank 0 described the data for all; a host whose copy is older would draw other samples, unseen."""
    digests = {str(prefix): content_digest(open_token_ids(str(prefix))) for prefix in prefixes}
    expected = tokens(blended(prefixes, None))
    assert tokens(blended(prefixes, None, digests=digests)) == expected
    write_pair(prefixes[1], seed=9)
    with pytest.raises(
        InputError, match=r"b\.bin: is not what rank 0 has under this path.*\n  fix: give all hosts"
    ):
        blended(prefixes, None, digests=digests)
