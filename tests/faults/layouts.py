"""Class T: a run saves in the background under each of ten layouts, and continues under each of them. Some save manifests in parts.

Expected: every canonical tensor that the other layout saves has the hash that it was saved with, and the next five losses are the same: to
the last bit under the same layout, and within rounding under another.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Sequence
from pathlib import Path

from canonical_weights import hash_tensors
from run_here import make_trainer, metrics

from faults.case import Cases, judge, manifests_in_parts, require
from faults.killed_runs import small_data
from megatrain.checkpoint.find import folder_name
from megatrain.checkpoint.manifest import read_root
from megatrain.checkpoint.reader import verify
from megatrain.tools.worker_pool import WorkerPool

SAVED_AT, NUM_ITERATIONS = 4, 9
_KINDS = ("weight", "exp_avg", "exp_avg_sq")
_TOLERANCE = 2e-5
"""Relative difference of losses in fp32 between layouts."""
_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
_ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp"
LAYOUTS = {
    "one process": (1, ""),
    "tp2": (2, _SP),
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp4": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "dp4 zero3": (4, _ZERO_3),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "tp2 dp2": (4, _SP),
    "dp2 pp2 zero0": (4, "--pipeline-model-parallel-size 2 --no-use-distributed-optimizer"),
}
IN_PARTS = ("tp2", "cp2", "tp4", "dp4 zero3", "tp2 dp2")
"""Layouts that save a manifest in parts, as with many ranks; all load both forms."""
_FLAGS = f"--train-iters {NUM_ITERATIONS} --eval-iters 0 --no-eval-at-start --save-interval {SAVED_AT} --async-save --verify-saves"


def layout_pairs(count: int, folder: Path, seed: int = 0) -> Cases:
    """Yield `count` pairs of layouts: first those with the same layout twice."""
    chance = random.Random(seed)
    same = [(name, name) for name in LAYOUTS]
    others = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other]
    chance.shuffle(same)
    chance.shuffle(others)
    with WorkerPool(4, timeout_seconds=120) as pool:
        saved = functools.cache(functools.partial(_saved, pool, folder))
        for number, (source, target) in enumerate([*same, *others][:count]):
            work = functools.partial(check_pair, pool, saved, source, target, folder / f"again-{number}")
            yield judge("T", f"{source} -> {target}", work, limit_seconds=240.0)


def check_pair(
    pool: WorkerPool, saved: functools.partial[Path], source: str, target: str, again: Path
) -> str:
    """Load under the target layout what was saved under the source layout, save it, and train on."""
    unbroken = saved(source)
    path = unbroken / folder_name(SAVED_AT)
    world_size, flags = LAYOUTS[target]
    given = [*flags.split(), *_FLAGS.split(), "--load", str(path), "--save", str(again)]
    pool.run(world_size, load_save_and_train, given, str(again / "loaded"), target in IN_PARTS)
    loaded = again / "loaded" / folder_name(SAVED_AT)
    require(verify(loaded) == [], "the checkpoint that was saved again is damaged")
    for kind in _KINDS:
        one, other = hash_tensors(path, kind), hash_tensors(loaded, kind)
        differing = [name for name in one if one[name] != other.get(name)]
        require(not differing and len(one) == len(other), f"{kind} differs: {differing[:3]}")
    expected, found = _losses(unbroken), _losses(again)
    require(len(expected) == len(found) == NUM_ITERATIONS - SAVED_AT, f"{len(found)} losses")
    if source == target:
        require(found == expected, f"the next losses are {found}, not {expected}")
        return "equal hashes, next five losses equal to the last bit"
    is_close = all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(expected, found, strict=True))
    require(is_close, f"the next losses are {found}, not {expected}")
    return "equal hashes, next five losses equal within rounding"


def load_save_and_train(
    rank: int, world_size: int, flags: Sequence[str], folder: str | None, in_parts: bool
) -> None:
    """Load a checkpoint, save it at once if there is a folder for it, and train."""
    with small_data(), manifests_in_parts() if in_parts else contextlib.nullcontext():
        trainer = make_trainer(rank, world_size, list(flags))
        trainer.resume()
        if folder is not None:
            trainer.save(Path(folder))
        exit_code = trainer.train()
    assert exit_code == 0, f"exit code {exit_code}"


def _saved(pool: WorkerPool, folder: Path, name: str) -> Path:
    """Train under a layout; return the folder of the run."""
    world_size, flags = LAYOUTS[name]
    save = folder / f"from-{name.replace(' ', '-')}"
    given = [*flags.split(), *_FLAGS.split(), "--save", str(save)]
    pool.run(world_size, load_save_and_train, given, None, name in IN_PARTS)
    is_in_parts = bool(read_root(save / folder_name(SAVED_AT)).parts)
    require(is_in_parts == (name in IN_PARTS), "the manifest has another form")
    return save


def _losses(folder: Path) -> list[float]:
    return [line["lm_loss"] for line in metrics(folder) if "lm_loss" in line and line["iteration"] > SAVED_AT]
