"""The checkpoint that a run continues, or whose weights it takes, and the settings that --use-checkpoint-args takes from it.

--load FOLDER                                  newest valid checkpoint   ┐
--load FOLDER/iter_0000100, --ckpt-step 100    that one                  ├─> StoredRun
non-persistent checkpoints of the same run     if newer                  │
--pretrained-checkpoint                        while --load has none     │
either with hf:FOLDER                          a folder of transformers  ┘

A folder may hold checkpoints of Megatron-LM and of megatrain: the newest of all counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.checkpoint.find import (
    Candidate,
    base_folder,
    find_checkpoints,
    folder_name,
    is_of_megatron,
    list_candidates,
    newest_valid,
)
from megatrain.checkpoint.manifest import read_root
from megatrain.config import Request, StoredRun
from megatrain.config.errors import NoCheckpointError, Problem
from megatrain.config.facts import FIRST_START
from megatrain.config.schema.training import HF_PREFIX, non_persistent_folder
from megatrain.config.stored_settings import stored_settings
from megatrain.training.launch.foreign_checkpoints import foreign_candidates, newest_foreign
from megatrain.training.launch.hf_folder import fix_of_transformers, start_of_folder


def stored_run(request: Request) -> StoredRun | None:
    """Return the newest valid checkpoint that the run continues or takes weights from, or None for a run from scratch.

    Raises:
        NoCheckpointError: a checkpoint is required and missing.
    """
    found = _whole_run(request)
    if found is None:
        return None
    if found.path.startswith(HF_PREFIX):
        return found
    settings = _taken_settings(request, found.config, has_run=found.iteration > 0)
    found = found.weights_only if found.is_start else found
    return replace(found, settings=settings)


def saved_folders(request: Request) -> dict[str, Path]:
    """Return the folders that the run saves checkpoints to, by flag."""
    save, interval = (
        request.known(f"checkpoint.{name}") for name in ("save", "non_persistent_save_interval")
    )
    folders = {} if save is None else {"--save": Path(save)}
    frequent = _non_persistent_folder(request)
    if frequent is not None and interval is not None and _saves(request):
        kind = request.known("checkpoint.non_persistent_ckpt_type")
        folders[f"--non-persistent-{kind}-ckpt-dir"] = frequent
    return folders


def save_folder_problems(request: Request) -> Iterator[Problem]:
    """Yield a problem for each output folder that has checkpoints which the run does not continue: a resume would load them."""
    save, step = request.known("checkpoint.save"), _chosen_step(request)
    newest = _newest_by_name(Path(save)) if save is not None and Path(save).is_dir() else None
    if newest is not None and not _continues_save_folder(request):
        yield Problem(
            f"--save {save} has checkpoints up to iteration {newest.iteration}, which this run does not continue",
            f"{_how_to_continue(request, save)}, or name another --save folder",
        )
    elif (
        newest is not None
        and step is not None
        and newest.iteration > step
        and _saves(request)
        and not _written_since_finetuning(request)
    ):
        yield Problem(
            f"--save {save} has checkpoints up to iteration {newest.iteration}: a run from iteration {step} would mix its own"
            " with them, and a restart would load the newest",
            f"name another --save folder, or move the checkpoints after iteration {step} away",
        )
    yield from _non_persistent_problems(request)


def _how_to_continue(request: Request, save: str | None) -> str:
    load, finetune = request.known("checkpoint.load"), request.known("checkpoint.finetune")
    if finetune and load is not None:  # the weights are needed until --save has a checkpoint of the run
        return f"use --pretrained-checkpoint {load} --load {save} in place of --finetune to continue them"
    return f"use --load {save} to continue them{' without --finetune' if finetune else ''}"


def step_problems(request: Request) -> Iterator[Problem]:
    """Yield a problem if --load names one checkpoint and --ckpt-step another."""
    step = request.known("checkpoint.ckpt_step")
    for name in ("load", "pretrained_checkpoint"):
        path = request.known(f"checkpoint.{name}")
        is_one = path is not None and base_folder(Path(path)) != Path(path)
        if step is not None and path is not None and is_one and Path(path).name != folder_name(step):
            flag = f"--{name.replace('_', '-')}"
            yield Problem(
                f"--ckpt-step {step} and {flag} {path} name two checkpoints",
                "remove --ckpt-step, or give the folder alone",
            )


def _whole_run(request: Request) -> StoredRun | None:
    """Return the checkpoint with its whole state; `is_start` if the run takes only its weights."""
    load, start = request.known("checkpoint.load"), request.known("checkpoint.pretrained_checkpoint")
    if load is not None and load.startswith(HF_PREFIX):
        return _start_of_folder(request, load)
    sources = () if load is None else _sources(request, load)
    found = _newest_of(request, sources)
    if found is not None:
        is_upcycled = _is_upcycled(request, found)
        started = _started(request, found.config)
        is_finetuned = bool(request.known("checkpoint.finetune")) and "finetune" not in started
        is_start = found.is_start or is_upcycled or is_finetuned
        return replace(found, is_start=is_start, is_upcycled=is_upcycled, started=started)
    has_candidates = load is not None and any(map(list_candidates, {base_folder(Path(load)), *sources}))
    if start is not None and not has_candidates:
        return _start(request, start)
    if load is None:
        return None
    save, chosen = request.known("checkpoint.save"), _chosen(load, request.known("checkpoint.ckpt_step"))
    is_first_run = save is not None and Path(save).resolve() == Path(load).resolve()
    may_start = request.known("checkpoint.load_or_start") or is_first_run
    is_empty = chosen == base_folder(chosen) and not has_candidates
    if is_empty and may_start and not request.known("checkpoint.exit_on_missing_checkpoint"):
        return None
    raise _no_checkpoint("--load", chosen, others=sources[1:])


def _start(request: Request, name: str) -> StoredRun:
    """Return the checkpoint of --pretrained-checkpoint."""
    if name.startswith(HF_PREFIX):
        return _start_of_folder(request, name)
    source = _chosen(name, request.known("checkpoint.ckpt_step"))
    found = _newest_of(request, (source,))
    if found is None:
        raise _no_checkpoint("--pretrained-checkpoint", source)
    return replace(found, is_start=True, is_upcycled=_is_upcycled(request, found))


def _start_of_folder(request: Request, name: str) -> StoredRun:
    """Return the start with the weights of a folder of transformers."""
    found, config = start_of_folder(name)
    settings = _taken_settings(request, config, has_run=False)
    is_upcycled = _is_upcycled(request, found)
    compared = {"model": found.config["model"]} if is_upcycled else found.config
    return replace(found, config=compared, settings=settings, is_upcycled=is_upcycled)


def _is_upcycled(request: Request, found: StoredRun) -> bool:
    is_dense = found.config.get("experts", {}).get("num_experts") is None
    return bool(request.known("experts.moe_use_upcycling")) and is_dense


def _started(request: Request, config: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings of a first start that no longer apply: the run that stored `config` had them too, and saved here."""
    saved = config.get("checkpoint", {})
    save = saved.get("save")
    if save is None or not continues_run_of(request, save):
        return ()
    return tuple(name for name in FIRST_START if request.known(f"checkpoint.{name}") and saved.get(name))


def _written_since_finetuning(request: Request) -> tuple[Path, ...]:
    """Return the checkpoints in the --save folder, newest first, that this run wrote after its start with --finetune.

    Their iterations count from 0: those of the checkpoint from which it started may be higher.
    """
    save = request.known("checkpoint.save")
    if save is None or not (request.known("checkpoint.finetune") and _continues_save_folder(request)):
        return ()
    found = [one.path for one in find_checkpoints(Path(save)) if one.problem is None]
    return tuple(path for path in found if "finetune" in _started(request, read_root(path).config))


def _sources(request: Request, load: str) -> tuple[Path, ...]:
    """Return the chosen checkpoint alone, or all folders with checkpoints of the run."""
    written = _written_since_finetuning(request)
    if written:
        return written
    chosen = _chosen(load, request.known("checkpoint.ckpt_step"))
    frequent = _non_persistent_folder(request)
    if _chosen_step(request) is not None or frequent is None or _other_run(request) is not None:
        return (chosen,)
    return (chosen, frequent)


def _chosen(path: str, step: int | None) -> Path:
    return Path(path) if step is None else base_folder(Path(path)) / folder_name(step)


def _chosen_step(request: Request) -> int | None:
    """Return the iteration that --ckpt-step or --load names."""
    load, step = request.known("checkpoint.load"), request.known("checkpoint.ckpt_step")
    if load is not None and step is None and base_folder(Path(load)) != Path(load):
        return int(Path(load).name.partition("_")[2])
    return step


def _newest_of(request: Request, sources: Sequence[Path]) -> StoredRun | None:
    found = [candidate for source in sources if (candidate := newest_valid(source)) is not None]
    newest = max(found, key=lambda candidate: candidate.iteration, default=None)
    vocab_size = request.known("tokenizer.vocab_size")
    after = -1 if newest is None else newest.iteration
    allows_format_torch = bool(request.known("checkpoint.allow_pickle"))
    foreign, reasons = newest_foreign(
        sources, vocab_size=vocab_size, allows_format_torch=allows_format_torch, after=after
    )
    if foreign is not None:
        return foreign
    if newest is None:
        if reasons:
            raise NoCheckpointError(
                "; ".join(reasons), fix="restore the checkpoint from a backup, or name another folder"
            )
        return None
    return StoredRun.of(read_root(newest.path), path=str(newest.path), sources=tuple(map(str, sources)))


def _taken_settings(
    request: Request, config: Mapping[str, Mapping[str, Any]], *, has_run: bool = True
) -> dict[str, Any]:
    """Return the settings that a run takes from a stored configuration; without a run, those of the model alone."""
    is_evaluated = bool(request.known("training.eval_only"))
    if not (is_evaluated or request.known("checkpoint.use_checkpoint_args")):
        return {}
    with_layout = bool(request.known("checkpoint.use_mp_args_from_checkpoint_args"))
    return stored_settings(config, request, with_layout=with_layout, with_training=is_evaluated and has_run)


def _no_checkpoint(flag: str, path: Path, others: Sequence[Path] = ()) -> NoCheckpointError:
    """Return the error of a run without a valid checkpoint at `path`, nor in the `others`: folders of non-persistent ones."""
    folder = base_folder(path)
    found = find_checkpoints(folder)
    if folder != path and found:
        readable = [one for one in found if one.problem is None or is_of_megatron(one.path)]
        valid = ", ".join(str(one.iteration) for one in reversed(readable))
        reasons = "".join(f"\n  {one.path}: {one.problem}" for one in found if one.path == path)
        return NoCheckpointError(
            f"{path} is not a valid checkpoint; {folder} has iterations {valid or 'none'}{reasons}",
            fix=f"choose one of these iterations with --ckpt-step, or give {flag} {folder} alone to load the newest",
        )
    damaged = [*found, *(one for other in others for one in find_checkpoints(other))]
    reasons = "".join(f"\n  {one.path}: {one.problem}" for one in damaged)
    has_none = "has no valid checkpoint" if folder.exists() else "does not exist"
    anew = "without --load, or with --load-or-start" if flag == "--load" else f"without {flag}"
    if damaged:
        fix = "restore one of these from a backup, or remove them to start from scratch"
    else:
        fix = fix_of_transformers(flag, folder) or (
            f"name the folder that --save named (it has iter_NNNNNNN folders), or start from scratch: {anew}"
        )
    return NoCheckpointError(f"{flag} {folder} {has_none}{reasons}", fix=fix)


def _newest_by_name(folder: Path) -> Candidate | None:
    """Return the newest checkpoint in a folder, whether valid or of Megatron-LM, which is not opened."""
    found = [*filter(None, [newest_valid(folder)]), *foreign_candidates((folder,))]
    return max(found, key=lambda candidate: candidate.iteration, default=None)


def _non_persistent_folder(request: Request) -> Path | None:
    names = (
        "save",
        "non_persistent_ckpt_type",
        "non_persistent_global_ckpt_dir",
        "non_persistent_local_ckpt_dir",
    )
    path = non_persistent_folder(*(request.known(f"checkpoint.{name}") for name in names))
    return None if path is None else Path(path)


def _continues_save_folder(request: Request) -> bool:
    save, load = request.known("checkpoint.save"), request.known("checkpoint.load")
    if save is None or load is None:
        return False
    return base_folder(Path(load)).resolve() == Path(save).resolve()


def _saves(request: Request) -> bool:
    return not (request.known("training.skip_train") or request.known("training.eval_only"))


def _other_run(request: Request) -> str | None:
    """Return the --save folder of the run whose checkpoints the non-persistent folder has; None: this run's, or none."""
    folder = _non_persistent_folder(request)
    newest = newest_valid(folder) if folder is not None else None
    if newest is None or continues_run_of(request, stored := save_folder_of(newest.path)):
        return None
    return stored


def save_folder_of(checkpoint: Path) -> str:
    """Return the --save folder of the run that saved a valid checkpoint."""
    return str(read_root(checkpoint).config.get("checkpoint", {}).get("save"))


def of_another_run(folder: Path | str | None, save: str) -> str:
    """Return the problem of a folder with checkpoints of the run in another --save folder."""
    return (
        f"{folder} has non-persistent checkpoints of the run in --save {save}, which this run does not continue and would"
        " replace"
    )


def continues_run_of(request: Request, stored: str) -> bool:
    """Return whether this run continues the one with the --save folder `stored`."""
    if not _continues_save_folder(request):
        return False
    save = Path(str(request.known("checkpoint.save")))
    was_started = (save / "config.yaml").exists() or bool(list_candidates(save))
    return was_started and Path(stored).resolve() == save.resolve()


def _non_persistent_problems(request: Request) -> Iterator[Problem]:
    other, folder, step = _other_run(request), _non_persistent_folder(request), _chosen_step(request)
    save = request.known("checkpoint.save")
    if folder is not None and save is not None and folder.resolve() == Path(save).resolve():
        yield Problem(
            f"non-persistent checkpoints and --save have the same folder, {folder.resolve()}: only the newest would be kept",
            "name another folder with --non-persistent-global-ckpt-dir or --non-persistent-local-ckpt-dir",
        )
        return
    if other is not None:
        yield Problem(
            of_another_run(folder, other),
            "remove the folder, or name another with --non-persistent-global-ckpt-dir or --non-persistent-local-ckpt-dir",
        )
        return
    if folder is None or step is None or not (_saves(request) and _continues_save_folder(request)):
        return
    newest = newest_valid(folder)
    if newest is not None and newest.iteration > step:
        yield Problem(
            f"{newest.path} is newer than iteration {step}: a restart would load it",
            f"remove {newest.path}, if it is on a disk of each node on all of them",
        )
