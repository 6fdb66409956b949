"""A run that is killed and resumed equals an unbroken one bitwise; any layout resumes from a checkpoint of any other."""

import random
from pathlib import Path

import pytest
from canonical_weights import hash_tensors
from everyday import only
from metrics_files import logged_losses
from run_here import LAYOUTS, UnbrokenRuns, folder_flags, make_trainer, metrics, train_here

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.reader import verify
from megatrain.tools.worker_pool import WorkerError, WorkerPool

STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")


def states(folder: Path) -> dict[str, dict[str, str]]:
    newest = newest_valid(folder)
    assert newest is not None
    assert newest.iteration == 20
    assert verify(newest.path) == []
    return {kind: hash_tensors(newest.path, kind) for kind in STATE_KINDS}


@pytest.fixture(scope="session")
def unbroken(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    """Return runs of 20 iterations by layout."""

    def train(name: str, folder: Path) -> set[int]:
        world_size, flags = LAYOUTS[name]
        return set(pool.run(world_size, train_here, [*flags, *folder_flags(folder)]))

    return UnbrokenRuns(train, tmp_path_factory)


ALWAYS = ("one process", "tp2")
"""Layouts that every test run covers; nightly runs cover the others."""
EACH_LAYOUT = [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.nightly) for name in LAYOUTS]


@pytest.mark.parametrize("name", only(("one process",), LAYOUTS))
def test_ten_and_ten_iterations_are_twenty(
    pool: WorkerPool, unbroken: UnbrokenRuns, tmp_path: Path, name: str
) -> None:
    world_size, flags = LAYOUTS[name]
    flags = [*flags, *folder_flags(tmp_path)]
    assert set(pool.run(world_size, train_here, [*flags, "--exit-interval", "10"])) == {75}
    assert set(pool.run(world_size, train_here, flags)) == {0}
    assert metrics(tmp_path) == metrics(unbroken[name])
    assert states(tmp_path) == states(unbroken[name])


@pytest.mark.nightly  # tests/faults kills several ranks every time
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["one process", "tp2 dp2", "tp2"])
def test_killed_at_random_moments_and_resumed_equals_never_killed(
    pool: WorkerPool, unbroken: UnbrokenRuns, tmp_path: Path, name: str, seed: int
) -> None:
    world_size, flags = LAYOUTS[name]
    chance, num_kills = random.Random(seed), 0
    while num_kills < 4:
        try:
            span = {1: 0.6, 2: 1.2}.get(world_size, 3.0)
            pool.run(world_size, train_here, [*flags, *folder_flags(tmp_path)], chance.uniform(0.01, span))
        except WorkerError:
            num_kills += 1
            continue
        break
    assert set(pool.run(world_size, train_here, [*flags, *folder_flags(tmp_path)])) == {0}
    assert metrics(tmp_path) == metrics(unbroken[name])
    assert states(tmp_path) == states(unbroken[name])
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("source", EACH_LAYOUT)
@pytest.mark.parametrize("target", EACH_LAYOUT)
def test_any_layout_resumes_from_any_others_checkpoint(
    pool: WorkerPool, unbroken: UnbrokenRuns, tmp_path: Path, source: str, target: str
) -> None:
    flags = [*LAYOUTS[target][1], "--load", str(unbroken[source]), "--save", str(tmp_path)]
    world_size = LAYOUTS[target][0]
    answers = pool.run(world_size, load_and_save, flags, str(tmp_path / "again"))
    assert len(answers) == world_size
    newest, again = newest_valid(unbroken[source]), newest_valid(tmp_path / "again")
    assert newest is not None
    assert again is not None
    for kind in STATE_KINDS:
        assert hash_tensors(again.path, kind) == hash_tensors(newest.path, kind)


def load_and_save(rank: int, world_size: int, flags: list[str], folder: str) -> None:
    """Load a checkpoint and save it under this layout."""
    trainer = make_trainer(rank, world_size, flags)
    trainer.resume()
    trainer.save(Path(folder))


@pytest.mark.parametrize("name", EACH_LAYOUT[1:])
def test_losses_of_all_layouts_agree(unbroken: UnbrokenRuns, name: str) -> None:
    alone = logged_losses(unbroken["one process"])
    found = logged_losses(unbroken[name])
    assert found == pytest.approx(alone, rel=2e-5)


GPT2 = (
    "--normalization LayerNorm --no-swiglu --no-disable-bias-linear --position-embedding-type learned_absolute "
    "--max-position-embeddings 16 --hidden-dropout 0.1 --attention-dropout 0.1 --qk-layernorm --softmax-type learnable"
).split()


@pytest.mark.nightly
def test_a_model_with_dropout_resumes_under_another_layout_with_the_same_losses(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Biases, position embeddings, sinks and head norms are restored, and the same elements are dropped."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert set(pool.run(1, train_here, [*GPT2, *folder_flags(whole)])) == {0}
    assert set(pool.run(1, train_here, [*GPT2, *folder_flags(cut), "--exit-interval", "10"])) == {75}
    world_size, flags = LAYOUTS["tp2 dp2 pp2"]
    assert set(pool.run(world_size, train_here, [*GPT2, *flags, *folder_flags(cut)])) == {0}
    expected, found = map(logged_losses, (whole, cut))
    assert len(found) == 20
    assert found == pytest.approx(expected, rel=2e-5)
    assert found[:10] == expected[:10]
