"""Runs that save in the background: the same checkpoints, also after kills; failures are never forgotten; the end waits."""

import errno
import functools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from canonical_weights import hash_tensors
from everyday import one_in
from metrics_files import logged_lines
from run_here import LAYOUTS, UnbrokenRuns, folder_flags, make_trainer, metrics, train_here
from test_resume import EACH_LAYOUT, STATE_KINDS

from megatrain.checkpoint.background import BackgroundWriter
from megatrain.checkpoint.find import find_checkpoints
from megatrain.checkpoint.reader import verify
from megatrain.tools.worker_pool import WorkerError, WorkerPool
from megatrain.training import evaluation, saving
from megatrain.training.engine import Engine

ASYNC = ["--async-save"]
SHORT = ["--num-layers", "1", "--global-batch-size", "4"]
"""Flags of runs whose numbers are not looked at."""
FAULTY_WRITER = """
import errno, os, pathlib, signal, time
from megatrain.storage.disk import Disk
from megatrain.checkpoint.writer_process import serve

class FaultyDisk(Disk):
    def create(self, path):
        if {condition}:
            {fault}
        return super().create(path)

serve(FaultyDisk())
"""
ALL, NUMBER_8 = "True", "'iter_0000008' in str(path)"
FULL = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
SLOW = "time.sleep(1.5)"


def saved(folder: Path) -> dict[str, Any]:
    """Return a hash of every tensor of every checkpoint, and what the manifests store besides; all are valid."""
    found: dict[str, Any] = {}
    for candidate in find_checkpoints(folder):
        assert verify(candidate.path) == []
        manifest = json.loads((candidate.path / "manifest.json").read_text())
        found[candidate.path.name] = (
            [hash_tensors(candidate.path, kind) for kind in (*STATE_KINDS, "momentum")],
            {key: manifest[key] for key in ("state", "optimizer_step_count", "consumed_train_samples")},
        )
    return found


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def train_with(
    rank: int, world_size: int, flags: list[str], program: str, signal_at: int = 0
) -> tuple[int, str]:
    """Train with another writer on rank 0; return the exit code or the error, and what was printed. SIGTERM comes after a begin."""
    lines: list[str] = []
    options = {"program": program} if rank == 0 else {}
    with mock.patch.object(saving, "BackgroundWriter", functools.partial(BackgroundWriter, **options)):
        trainer = make_trainer(rank, world_size, flags)

        def print_and_remember(text: str) -> None:
            lines.append(text)
            if signal_at and text.startswith(f"> saving iteration {signal_at} in the background"):
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

        with mock.patch.object(trainer.ranks.console, "print", print_and_remember):
            trainer.resume()
            try:
                exit_code = trainer.train()
            except Exception as error:  # noqa: BLE001 (the test checks it)
                exit_code = getattr(error, "exit_code", -1)
                lines.append(str(error))
    return exit_code, "\n".join(lines)


@pytest.fixture(scope="session")
def synchronous(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    """Return runs of 20 iterations without --async-save by flags."""

    def train(name: str, folder: Path) -> set[int]:
        world_size, flags = LAYOUTS[name.split("|", maxsplit=1)[0]]
        return set(
            pool.run(world_size, train_here, [*flags, *name.split("|")[1].split(), *folder_flags(folder)])
        )

    return UnbrokenRuns(train, tmp_path_factory)


OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
OPTIONS = [
    ("one process", "--num-layers 1 --global-batch-size 4"),
    *[
        pytest.param(*pair, marks=pytest.mark.nightly)
        for pair in [
            ("one process", ""),
            ("one process", "--bf16"),
            *[(parameter.values[0], "") for parameter in EACH_LAYOUT[1:]],
            ("dp4", OFFLOAD),
            ("dp4", f"{OFFLOAD} --bf16"),
            ("dp4", "--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp"),
            ("dp4", ZERO_3),
            ("dp4", f"{ZERO_3} --bf16"),
            ("tp2 dp2", "--optimizer muon --muon-momentum 0.9"),
            ("tp2 dp2", "--optimizer soap"),
            ("one process", "--optimizer sgd"),
            ("dp4", f"{EXPERTS} --expert-model-parallel-size 2"),
            ("tp2 dp2", "--no-save-optim"),
        ]
    ],
]


@pytest.mark.parametrize(("layout", "options"), OPTIONS)
def test_checkpoints_equal_those_of_a_run_that_waits(
    pool: WorkerPool, synchronous: UnbrokenRuns, tmp_path: Path, layout: str, options: str
) -> None:
    world_size, flags = LAYOUTS[layout]
    flags = [*flags, *options.split(), *folder_flags(tmp_path), *ASYNC, "--verify-saves"]
    assert set(pool.run(world_size, train_here, flags)) == {0}
    unbroken = synchronous[f"{layout}|{options}"]
    assert len(saved(tmp_path)) == 5
    assert saved(tmp_path) == saved(unbroken)
    assert metrics(tmp_path) == metrics(unbroken)


@pytest.mark.nightly  # tests/faults kills such runs every time
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["one process", "tp2 dp2"])
def test_killed_at_random_moments_and_resumed_equals_never_killed(
    pool: WorkerPool, synchronous: UnbrokenRuns, tmp_path: Path, name: str, seed: int
) -> None:
    world_size, flags = LAYOUTS[name]
    flags = [*flags, *folder_flags(tmp_path), *ASYNC]
    chance = random.Random(seed)
    for _ in range(3):
        before = {candidate.iteration for candidate in find_checkpoints(tmp_path) if not candidate.problem}
        try:
            pool.run(world_size, train_here, flags, chance.uniform(0.3, 1.5 if world_size == 1 else 5.0))
        except WorkerError:
            after = {candidate.iteration for candidate in find_checkpoints(tmp_path) if not candidate.problem}
            assert before <= after
            continue
        break
    assert set(pool.run(world_size, train_here, flags)) == {0}
    unbroken = synchronous[f"{name}|"]
    assert saved(tmp_path) == saved(unbroken)
    assert metrics(tmp_path) == metrics(unbroken)
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("fault", one_in(2, [FULL, DIES]))
@pytest.mark.nightly
def test_a_failed_write_stops_the_run(pool: WorkerPool, tmp_path: Path, fault: str) -> None:
    program = FAULTY_WRITER.format(condition=NUMBER_8, fault=fault)
    flags = [*LAYOUTS["tp2"][1], *SHORT, *folder_flags(tmp_path), *ASYNC]
    answers = pool.run(2, train_with, flags, program)
    assert {exit_code for exit_code, _ in answers} == {1}
    assert "committed iteration 4" in answers[0][1]
    assert "saving iteration 8 to" in status(tmp_path)["reason"]
    assert status(tmp_path)["exit_code"] == 1
    assert list(saved(tmp_path)) == ["iter_0000004"]
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("fault", [FULL, pytest.param(DIES, marks=pytest.mark.nightly)])
def test_a_failed_write_is_a_warning_if_wanted(pool: WorkerPool, tmp_path: Path, fault: str) -> None:
    program = FAULTY_WRITER.format(condition=NUMBER_8, fault=fault)
    flags = [*SHORT, *folder_flags(tmp_path), *ASYNC, "--on-save-failure", "warn"]
    ((exit_code, text),) = pool.run(1, train_with, flags, program)
    assert exit_code == 0
    assert "> WARNING: saving iteration 8 to" in text
    assert sorted(saved(tmp_path)) == ["iter_0000004", "iter_0000012", "iter_0000016", "iter_0000020"]


@pytest.mark.parametrize("flags", [ASYNC, []])
def test_a_run_whose_last_save_failed_does_not_exit_with_0(
    pool: WorkerPool, tmp_path: Path, flags: list[str]
) -> None:
    flags = [*SHORT, *folder_flags(tmp_path), *flags, "--on-save-failure", "warn"]
    ((exit_code, text),) = pool.run(1, train_with_a_file_in_the_way, flags, str(tmp_path))
    assert exit_code == 1
    assert text.count("> WARNING: saving iteration") == 1
    assert "the last save failed: saving iteration 20" in status(tmp_path)["reason"]


def train_with_a_file_in_the_way(
    rank: int, world_size: int, flags: list[str], folder: str
) -> tuple[int, str]:
    """Train with a file where the last checkpoint's temporary folder would be."""

    def fixed_id(_: int) -> str:
        (Path(folder) / "iter_0000020.tmp-ab").touch()
        return "ab"

    with mock.patch("megatrain.checkpoint.save.secrets.token_hex", fixed_id):
        return train_with(
            rank, world_size, flags, "from megatrain.checkpoint.writer_process import serve; serve()"
        )


@pytest.mark.parametrize("flags", one_in(2, [ASYNC, []]))
@pytest.mark.nightly
def test_times_of_saves_are_in_the_metrics_and_in_the_status(
    pool: WorkerPool, tmp_path: Path, flags: list[str]
) -> None:
    flags = [*LAYOUTS["tp2"][1], *SHORT, *folder_flags(tmp_path), *flags, "--train-iters", "15"]
    assert pool.run(2, train_here, flags) == [0, 0]
    lines = logged_lines(tmp_path)
    found = {line["iteration"]: line["save"] for line in lines if line.get("save") is not None}
    last = status(tmp_path)["last_save"]
    assert [save["iteration"] for save in [*found.values(), last]] == [4, 8, 12, 15]
    for number, save in [*found.items(), (16, last)]:
        assert number > save["iteration"]
        files = (tmp_path / f"iter_{save['iteration']:07d}").glob("*.safetensors")
        assert save["folder"] == str(tmp_path)
        assert save["bytes"] == sum(file.stat().st_size for file in files)
        assert 0 < save["commit_ms"] <= save["stall_ms"] <= save["duration_ms"]


def test_a_second_save_waits_for_the_first(pool: WorkerPool, tmp_path: Path) -> None:
    program = FAULTY_WRITER.format(condition=ALL, fault=SLOW)
    flags = [*SHORT, *folder_flags(tmp_path), *ASYNC, "--train-iters", "8"]
    start = time.monotonic()
    ((exit_code, text),) = pool.run(1, train_with, flags, program)
    assert exit_code == 0
    assert time.monotonic() - start > 3.0
    order = [f"saving iteration {number} in the background" for number in (4, 8)]
    places = [
        text.index(words) for words in (order[0], "committed iteration 4", order[1], "committed iteration 8")
    ]
    assert places == sorted(places)
    assert text.count("> waiting until iteration") == 2
    assert sorted(saved(tmp_path)) == ["iter_0000004", "iter_0000008"]


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "one process"), pytest.param(2, "tp2", marks=pytest.mark.nightly)]
)
def test_a_save_is_committed_during_an_evaluation(
    pool: WorkerPool, tmp_path: Path, world_size: int, layout: str
) -> None:
    """The writer waits for the evaluation, and the evaluation gets slow until the save is committed."""
    flags = [*LAYOUTS[layout][1], *folder_flags(tmp_path), *ASYNC]
    flags += "--train-iters 7 --eval-interval 6 --eval-iters 10".split()
    answers = pool.run(world_size, train_with_a_slow_evaluation, flags, str(tmp_path))
    assert {exit_code for exit_code, _ in answers} == {0}
    text = answers[0][1]
    committed, evaluated = text.index("> committed iteration 4"), text.index("loss at iteration 6")
    assert text.index("> saving iteration 4 in the background") < committed < evaluated
    assert "waiting until iteration 4" not in text


def train_with_a_slow_evaluation(
    rank: int, world_size: int, flags: list[str], folder: str
) -> tuple[int, str]:
    is_evaluating, newest, evaluate = Path(folder) / "evaluating", "iter_0000004", evaluation.evaluate

    def slow(engine: Engine, *args: Any) -> Any:
        if list(Path(folder).glob(f"{newest}*")):
            is_evaluating.touch()
        if is_evaluating.exists() and not (Path(folder) / newest).exists():
            time.sleep(0.5)
        return evaluate(engine, *args)

    wait = f"while not os.path.exists({str(is_evaluating)!r}): time.sleep(0.02)"
    with mock.patch.object(evaluation, "evaluate", slow):
        return train_with(rank, world_size, flags, FAULTY_WRITER.format(condition=ALL, fault=wait))


def test_a_signal_waits_for_the_pending_save(pool: WorkerPool, tmp_path: Path) -> None:
    program = FAULTY_WRITER.format(condition=ALL, fault=SLOW)
    flags = [*LAYOUTS["tp2"][1], *SHORT, *folder_flags(tmp_path), *ASYNC, "--train-iters", "100000"]
    answers = pool.run(2, train_with, flags, program, 4)
    assert {exit_code for exit_code, _ in answers} == {75}
    assert "signal SIGTERM" in status(tmp_path)["reason"]
    assert "committed iteration 4" in answers[0][1]
    newest, *_ = find_checkpoints(tmp_path)
    assert newest.iteration == status(tmp_path)["iteration"]
    assert newest.problem is None
