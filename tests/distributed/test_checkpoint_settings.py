"""Runs that choose a checkpoint, keep a few, save often to another folder, or take their settings from a checkpoint."""

import contextlib
import io
import shutil
from pathlib import Path

import pytest
import torch
from canonical_weights import hash_tensors
from everyday import one_in
from run_here import MODEL as LARGER_MODEL
from run_here import folder_flags, train_here

from megatrain.checkpoint.find import find_checkpoints
from megatrain.config import ConfigError, parse, resolve
from megatrain.config.cli.render_plan import render_plan
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import NoCheckpointError
from megatrain.config.plan import Plan
from megatrain.inference.stored_model import ModelOptions, load_model
from megatrain.tools.worker_pool import WorkerPool
from megatrain.training.launch.facts import gather_facts
from megatrain.training.launch.ranks import report_errors

SMALL = ["--num-layers", "1", "--global-batch-size", "4"]
"""These tests are about files: one layer and few micro-batches are enough."""
MODEL = [*LARGER_MODEL, *SMALL]


def iterations(folder: Path) -> list[int]:
    return sorted(candidate.iteration for candidate in find_checkpoints(folder) if not candidate.problem)


def train(pool: WorkerPool, *flags: str, world_size: int = 1) -> set[int]:
    return set(pool.run(world_size, train_here, [*SMALL, *flags]))


def plan_of(*flags: str, model: list[str] = MODEL) -> Plan:
    request = parse([*model, *flags])
    return resolve(request, gather_facts(request, LaunchEnvironment()))


@pytest.fixture(scope="module")
def stored(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of iterations 4, 8, 12, 16 and 20."""
    folder = tmp_path_factory.mktemp("stored")
    assert train(pool, *folder_flags(folder)) == {0}
    return folder


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "copied"))


@pytest.mark.parametrize("form", one_in(2, ["--ckpt-step", "folder"]))
def test_a_run_starts_from_the_chosen_checkpoint(
    pool: WorkerPool, stored: Path, tmp_path: Path, form: str
) -> None:
    load = (
        ["--load", f"{stored}/iter_0000008"]
        if form == "folder"
        else ["--load", str(stored), "--ckpt-step", "8"]
    )
    assert plan_of(*load).derived.start_iteration == 8
    (tmp_path / "new").mkdir()
    assert train(pool, *load, "--save", str(tmp_path / "new")) == {0}
    assert hash_tensors(tmp_path / "new" / "iter_0000020") == hash_tensors(stored / "iter_0000020")


def test_a_missing_step_names_those_that_exist(stored: Path, copied: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"4, 8, 12, 16, 20(.|\n)*--ckpt-step"):
        plan_of("--load", str(stored), "--ckpt-step", "10")
    (copied / "iter_0000008" / "shard_00000.safetensors").unlink()
    with pytest.raises(NoCheckpointError, match=r"4, 12, 16, 20\n.*shard_00000"):
        plan_of("--load", f"{copied}/iter_0000008")
    with pytest.raises(ConfigError, match="--ckpt-step 12 and --load"):
        plan_of("--load", f"{stored}/iter_0000008", "--ckpt-step", "12")
    with pytest.raises(
        NoCheckpointError, match=f"--load {copied}/no does not exist\n.*folder that --save named"
    ):
        plan_of("--load", f"{copied}/no", "--ckpt-step", "12")


def test_a_step_within_its_own_folder_needs_the_newer_ones_away(copied: Path) -> None:
    flags = ["--load", str(copied), "--save", str(copied), "--ckpt-step", "12"]
    with pytest.raises(ConfigError, match=r"up to iteration 20(.|\n)*--save"):
        plan_of(*flags)
    assert plan_of(*flags, "--skip-train").derived.start_iteration == 12
    for newer in ("iter_0000016", "iter_0000020"):
        shutil.rmtree(copied / newer)
    assert plan_of(*flags).derived.start_iteration == 12


def test_a_pretrained_checkpoint_can_be_chosen(stored: Path, tmp_path: Path) -> None:
    plan = plan_of("--load", str(tmp_path / "new"), "--save", str(tmp_path / "new"), "--pretrained-checkpoint",
                   f"{stored}/iter_0000004")  # fmt: skip
    assert plan.derived.start_iteration == 0
    assert "iter_0000004" in plan.origins["derived.start_iteration"].detail


@pytest.mark.parametrize(("name", "iteration"), [("", 20), ("iter_0000008", 8)])
def test_a_model_for_generation_can_be_chosen(stored: Path, name: str, iteration: int) -> None:
    loaded = load_model(stored / name, ModelOptions(device=torch.device("cpu"), dtype=torch.float32))
    assert loaded.iteration == iteration


@pytest.mark.parametrize(
    ("flags", "kept"),
    [(["--keep-last", "2"], [16, 20]), (["--save-retain-interval", "8"], [8, 16, 20])],
)
def test_a_run_keeps_what_it_is_asked_to(
    pool: WorkerPool, tmp_path: Path, flags: list[str], kept: list[int]
) -> None:
    assert train(pool, *folder_flags(tmp_path), *flags) == {0}
    assert iterations(tmp_path) == kept


OFTEN = "--non-persistent-save-interval 3 --non-persistent-ckpt-type global --save-interval 10".split()


@pytest.mark.parametrize("world_size", one_in(2, [1, 2]))
def test_a_killed_run_resumes_from_the_newest_checkpoint_of_both_folders(
    pool: WorkerPool, stored: Path, tmp_path: Path, world_size: int
) -> None:
    flags = ["--save", str(tmp_path), "--load", str(tmp_path), *OFTEN]
    assert train(pool, *flags, "--exit-interval", "16", world_size=world_size) == {75}
    assert iterations(tmp_path) == [10, 16]
    assert iterations(tmp_path / "non_persistent") == [15]
    shutil.rmtree(tmp_path / "iter_0000016")  # as if the run had been killed before
    plan = plan_of(*flags)
    assert plan.derived.start_iteration == 15
    assert train(pool, *flags, world_size=world_size) == {0}
    if world_size == 1:
        assert hash_tensors(tmp_path / "iter_0000020") == hash_tensors(stored / "iter_0000020")
    assert iterations(tmp_path / "non_persistent") == [18]
    shard = tmp_path / "iter_0000020" / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert plan_of(*flags).derived.start_iteration == 18
    for number in (10, 20):
        shutil.rmtree(tmp_path / f"iter_{number:07d}")
    manifest = tmp_path / "non_persistent" / "iter_0000018" / "manifest.json"
    manifest.write_text("{")  # the only one left is damaged: that is no fresh start
    with pytest.raises(NoCheckpointError, match=r"iter_0000018(.|\n)*restore one of these"):
        plan_of(*flags)


def test_non_persistent_checkpoints_of_another_run_are_neither_loaded_nor_replaced(
    pool: WorkerPool, tmp_path: Path
) -> None:
    often = [*OFTEN, "--non-persistent-global-ckpt-dir", str(tmp_path / "fast")]
    one, other = (
        ["--save", str(tmp_path / name), "--load", str(tmp_path / name)] for name in ("one", "other")
    )
    (tmp_path / "one").mkdir()
    assert train(pool, *one, *often, "--exit-interval", "7") == {75}
    for flags in (other, other[:2]):
        with pytest.raises(ConfigError, match=r"fast(.|\n)*one(.|\n)*--non-persistent-global-ckpt-dir"):
            plan_of(*flags, *often)
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(ConfigError, match="remove the folder"):
        plan_of(*one, *often)


OTHERS = (
    "--mock-data --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-2 --lr-decay-style cosine"
    " --lr-warmup-iters 3 --eval-interval 7 --eval-iters 1 --eval-at-start --device cpu"
).split()


def test_the_model_is_taken_from_the_checkpoint(stored: Path) -> None:
    plan = plan_of("--load", str(stored), "--use-checkpoint-args", model=OTHERS)
    whole = plan_of("--load", str(stored))
    for section in ("model", "experts", "tokenizer"):
        assert getattr(plan.config, section) == getattr(whole.config, section)
    assert plan.config.data.seq_length == 16
    assert plan.derived.start_iteration == 20
    assert str(plan.origins["model.hidden_size"]) == f"checkpoint: {stored}/iter_0000020"
    assert plan.origins["optimizer.lr"].kind == "flag"
    assert f"given by the checkpoint {stored}/iter_0000020" in render_plan(plan)


def test_the_command_line_takes_precedence_over_the_checkpoint(stored: Path) -> None:
    with pytest.raises(ConfigError, match="--hidden-size cannot change on resume"):
        plan_of("--load", str(stored), "--use-checkpoint-args", "--hidden-size", "64", model=OTHERS)
    flags = ["--load", f"{stored}/iter_0000012", "--finetune", "--use-checkpoint-args", "--seq-length", "8"]
    plan = plan_of(*flags, model=OTHERS)
    assert (plan.config.data.seq_length, plan.config.model.hidden_size) == (8, 32)
    assert plan.derived.start_iteration == 0


def test_the_layout_is_taken_if_it_is_asked_for(pool: WorkerPool, tmp_path: Path) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    assert train(pool, "--save", str(tmp_path), "--exit-interval", "2", *layout, world_size=2) == {75}
    flags = ["--load", str(tmp_path), "--finetune", "--use-checkpoint-args"]
    assert plan_of(*flags, model=OTHERS).config.parallel.tensor_model_parallel_size == 1
    request = parse([*OTHERS, *flags, "--use-mp-args-from-checkpoint-args"])
    plan = resolve(request, gather_facts(request, LaunchEnvironment(world_size=2)))
    assert plan.config.parallel.tensor_model_parallel_size == 2
    assert plan.config.parallel.sequence_parallel


def test_settings_need_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="--load"):
        plan_of("--load", str(tmp_path), "--use-checkpoint-args", model=OTHERS)


@pytest.mark.parametrize("file", ["common.pt", ".metadata"])
@pytest.mark.parametrize("flags", [["--use-checkpoint-args"], ["--load-or-start"]])
def test_a_hostile_checkpoint_of_megatron_is_an_error(tmp_path: Path, file: str, flags: list[str]) -> None:
    path = tmp_path / "iter_0000100" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(
        NoCheckpointError,
        match=r"/\.metadata: .*\n  fix: restore the checkpoint from a backup",
    ):
        plan_of("--load", str(tmp_path), *flags)


def damage(path: Path) -> None:
    """Change the first values of a checkpoint's first shard; sizes stay."""
    shard = path / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header : header + 8] = b"\x5a" * 8
    shard.write_bytes(data)


def print_of_training(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    """Train with these flags; return the exit code and what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if world_size == 1:
            code = report_errors(lambda: train_here(rank, world_size, [*SMALL, *flags]))
        else:  # `report_errors` would end the process of the pool
            code = train_here(rank, world_size, [*SMALL, *flags])
    return code, printed.getvalue()


@pytest.mark.parametrize("world_size", one_in(2, [2, 1]))
def test_all_ranks_fall_back_to_the_newest_intact_checkpoint(
    pool: WorkerPool, copied: Path, world_size: int
) -> None:
    damage(copied / "iter_0000020")
    damage(copied / "iter_0000016")
    flags = ["--load", str(copied), "--save", str(copied)]
    answers = pool.run(world_size, print_of_training, flags)
    assert {code for code, _ in answers} == {0}
    printed = answers[0][1]
    for iteration, lost in ((20, 8), (16, 4)):
        (line,) = (line for line in printed.splitlines() if f"skipped iteration {iteration}" in line)
        assert f"iter_00000{iteration}/shard_00000.safetensors" in line
        assert "checksum" in line
        assert f"{lost} iterations are lost" in line
    assert "iter_0000012: iteration 12" in printed
    assert iterations(copied)[-1] == 20


def test_a_run_without_an_intact_checkpoint_ends_with_exit_code_3(pool: WorkerPool, copied: Path) -> None:
    for path in copied.glob("iter_*"):
        damage(path)
    ((code, printed),) = pool.run(1, print_of_training, ["--load", str(copied), "--save", str(copied)])
    assert code == 3
    for iteration in (4, 8, 12, 16, 20):
        assert f"iteration {iteration}: " in printed
    assert "fix: " in printed
    assert "Traceback" not in printed
