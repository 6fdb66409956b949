"""Gather the facts of a plan: devices, tokenizer, data files, checkpoint, installed libraries.

Problems with files are returned with the facts, so that all problems are reported together; only a `--load` without a valid
checkpoint raises an error here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from megatrain.config import Facts, Plan, Request, StoredRun, resolve
from megatrain.config.derive.datasets import Blend
from megatrain.config.environment import LaunchEnvironment
from megatrain.config.errors import ConfigError, NoCheckpointError, Problem
from megatrain.config.facts import DatasetFacts
from megatrain.config.module_precision import PrecisionFileError, matchers_of
from megatrain.config.nccl_options import read_group_options
from megatrain.config.schema.data import MASKED_FAMILIES, DataConfig
from megatrain.config.schema.tokenizer import tokenizer_problems
from megatrain.config.schema.tree import Origin
from megatrain.config.schema.values import is_resolved
from megatrain.config.stored_settings import with_settings, with_stored_settings
from megatrain.data.files import log_to_stderr
from megatrain.data.images.build import image_facts
from megatrain.data.preprocess.raw_text import RawText, is_text
from megatrain.data.samples.data_schedule import read_data_schedule
from megatrain.data.samples.sources import blends_from_config, flags_of_blends, inspect_datasets, used_eod
from megatrain.data.tasks.files import read_tasks
from megatrain.data.tasks.requests import requests_of_run
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.mask_tokens import mask_vocabulary
from megatrain.training.launch.hf_folder import described_settings
from megatrain.training.launch.output_paths import path_problems
from megatrain.training.launch.stored_run import save_folder_problems, step_problems, stored_run
from megatrain.training.launch.teacher import teacher_facts
from megatrain.training.launch.user_files import add_user_files

_LIBRARIES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "triton",
    "transformer_engine",
    "flash-attn",
    "flash-attn-4",
    "tensorboard",
    "wandb",
    "mlflow",
    "mlflow-skinny",
    "comet_ml",
    "nvidia-ml-py",
)


def gather_facts(request: Request, environment: LaunchEnvironment, *, tokenizes: bool = False) -> Facts:
    """Gather all facts that `resolve` needs. Unresolved and invalid settings are skipped.

    Args:
        tokenizes: tokenize text; otherwise `Facts.untokenized` names it.

    Raises:
        NoCheckpointError: `--load` has no valid checkpoint, and a start from scratch is not allowed.
    """
    described = described_settings(request)
    request, stored = _with_taken_settings(request, *described)
    found, problems = _input_facts(request, tokenizes=tokenizes)
    of_paths = list(path_problems(request))
    problems += (*of_paths, *step_problems(request))
    if stored is None and not problems:
        stored = stored_run(request)
    problems += () if of_paths else save_folder_problems(request)
    has_cuda = torch.cuda.is_available()
    facts = Facts(
        world_size=environment.world_size,
        device="cuda" if has_cuda else "cpu",
        device_name=torch.cuda.get_device_name() if has_cuda else None,
        device_capability=torch.cuda.get_device_capability() if has_cuda else None,
        cublas_workspace=environment.cublas_workspace,
        devices_per_node=_num_node_devices(environment) if has_cuda else None,
        ranks_per_node=environment.local_world_size,
        checkpoint=stored,
        described_settings=described[0],
        described_by=described[1],
        data_problems=tuple(problems),
        has_triton=importlib.util.find_spec("triton") is not None,
        libraries=library_versions(),
        **found,
    )
    return add_user_files(request, facts)


def _num_node_devices(environment: LaunchEnvironment) -> int:
    seen = torch.cuda.device_count()
    return environment.local_world_size if environment.binds_gpus and seen == 1 else seen


def gather_data_facts(
    request: Request, *, world_size: int, log: Callable[[str], None], tokenizes: bool = False
) -> Facts:
    """Gather the facts that samples depend on, for a run of `world_size` ranks.

    Output folders and the checkpoint's schedules are not checked. Without a valid checkpoint the facts are of a run from
    scratch, and `log` gets a line that says so.
    """
    described = described_settings(request)
    try:
        request, stored = _with_taken_settings(request, *described)
        found, problems = _input_facts(request, tokenizes=tokenizes)
        stored = stored or (stored_run(request) if not problems else None)
    except NoCheckpointError as error:
        stored, (found, problems) = None, _input_facts(request, tokenizes=tokenizes)
        log(f"{error.problems[0].text}: the samples below are of a run from scratch")
    facts = Facts(
        world_size=world_size,
        checkpoint=stored and dataclasses.replace(stored, schedule=None, has_optimizer=True),
        described_settings=described[0],
        described_by=described[1],
        data_problems=tuple(problems),
        libraries=library_versions(),
        **found,
    )
    return add_user_files(request, facts)


def _with_taken_settings(
    request: Request, described: Mapping[str, Any], file: str
) -> tuple[Request, StoredRun | None]:
    """Return the request with the settings that a file describes and the settings of --use-checkpoint-args, and the checkpoint.

    Without the latter flag there is no checkpoint yet.
    """
    request = with_settings(request, described, Origin("folder", file))
    is_wanted = request.known("checkpoint.use_checkpoint_args") or request.known("training.eval_only")
    is_wanted = is_wanted and not any(step_problems(request))
    stored = stored_run(request) if is_wanted else None
    return with_stored_settings(request, stored), stored


def _input_facts(request: Request, *, tokenizes: bool) -> tuple[dict[str, Any], list[Problem]]:
    """Return the facts of tokenizer and data, as fields of `Facts`, and their problems."""
    problems: list[Problem] = []
    tokenizer, found = dict[str, Any](), dict[str, Any]()
    try:
        tokenizer = _tokenizer_facts(request)
    except ConfigError as error:
        problems += error.problems
    path = request.known("model.heterogeneous_layers_config_path")
    if path is not None and request.known("model.heterogeneous_layers_config_encoded_json") is None:
        try:
            found["layers_config"] = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(
                Problem(
                    f"--heterogeneous-layers-config-path {path} cannot be read: {error}", "name a JSON file"
                )
            )
    file, example = request.known("precision.te_precision_config_file"), "docs/training.md has an example"
    found["module_precision"], of_file = _contents("--te-precision-config-file", file, matchers_of, example)
    problems += of_file
    file, example = request.known("parallel.nccl_communicator_config_path"), "such as `ep: {max_ctas: 16}`"
    found["nccl_options"], of_file = _contents(
        "--nccl-communicator-config-path", file, read_group_options, example
    )
    problems += of_file
    of_teacher, teacher_problems = teacher_facts(request)
    problems += teacher_problems
    of_data, data_problems = _data_facts(request, tokenizer, tokenizes=tokenizes)
    return tokenizer | found | of_teacher | of_data, [*problems, *data_problems]


def _contents(
    flag: str, file: str | None, read: Callable[[str], Any], example: str
) -> tuple[str | None, list[Problem]]:
    """Return the contents of the file of a flag, None without one, and its problems."""
    if file is None:
        return None, []
    try:
        text = Path(file).read_text(encoding="utf-8")
        read(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError, PrecisionFileError) as error:
        return None, [Problem(f"{flag} {file}: {error}", f"correct the file; {example}")]
    return text, []


def _data_facts(
    request: Request, tokenizer: Mapping[str, Any], *, tokenizes: bool
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the facts `datasets` and `untokenized`, and the problems of the data."""
    data = _data_config(request)
    # NullTokenizer reads token ids, which any tokenizer may have written.
    is_null = request.known("tokenizer.tokenizer_type") == "NullTokenizer"
    is_masked = request.known("model.model_family") in MASKED_FAMILIES
    try:
        if data.image_data_path:
            most_images = request.known("vision.images_per_sample") or 1
            images = image_facts(data, most_images=most_images, log=log_to_stderr)
            return {"datasets": tuple(images)}, []
        phases = _phases(data)
        texts = _texts(phases, request, tokenizer, has_sentences=is_masked)
        if texts is None:
            return {}, []
        untokenized = {name: text for name, text in texts.items() if not text.is_tokenized}
        if untokenized and not tokenizes:
            return {"untokenized": _by_split(phases, untokenized)}, []
        for text in untokenized.values():
            text.tokenize()
    except ConfigError as error:
        return {}, list(error.problems)
    datasets: list[DatasetFacts] = []
    problems: list[Problem] = []
    for start, phase in phases.items():
        found, of_phase = inspect_datasets(
            {name: _of_datasets(blend, texts) for name, blend in phase.items()},
            flags=dict.fromkeys(phase, "--data-schedule") if start else flags_of_blends(data),
            vocab_size=tokenizer.get("vocab_size"),
            tokenizer_fingerprint=None if is_null else tokenizer.get("tokenizer_fingerprint"),
            eod=used_eod(data, tokenizer.get("eod_id")),
            conversations=data.sft,
            sentences=is_masked,
            index_cache=data.object_storage_cache_path,
            cache_folder=request.known("data.data_cache_path"),
        )
        datasets += [dataclasses.replace(dataset, from_iteration=start) for dataset in found]
        problems += [problem for problem in of_phase if problem not in problems]
    return {"datasets": tuple(datasets)}, problems


def _data_config(request: Request) -> DataConfig:
    """Return the settings of the data as far as they are known."""
    names = [field.name for field in dataclasses.fields(DataConfig)]
    values = {name: request.known(f"data.{name}") for name in names}
    return DataConfig(**{name: value for name, value in values.items() if value is not None})


def _phases(data: DataConfig) -> dict[int, dict[str, Blend]]:
    """Return the blends of each phase of training, by the iteration at which it begins. Raises ConfigError."""
    blends = blends_from_config(data)
    schedule = read_data_schedule(data.data_schedule) if data.data_schedule is not None else {}
    split = "all" if "all" in blends else "train"
    return {0: blends, **{start: {split: blend} for start, blend in schedule.items()}}


def _texts(
    phases: Mapping[int, Mapping[str, Blend]],
    request: Request,
    tokenizer: Mapping[str, Any],
    *,
    has_sentences: bool,
) -> dict[str, RawText] | None:
    """Return the text among the datasets of blends, by name; None if its tokenizer has a problem, which is reported."""
    blends = [blend for phase in phases.values() for blend in phase.values()]
    names = [name for blend in blends for name in blend.prefixes if is_text(name)]
    if names and has_sentences:
        raise ConfigError(
            f"{names[0]} is text, but --model-family {request.known('model.model_family')} reads sentences",
            fix="make a dataset with preprocess_data.py --split-sentences, and give its prefix",
        )
    if names and not tokenizer:
        return None
    return {
        name: RawText.of(
            name,
            request.config.tokenizer,
            tokenizer=tokenizer,
            sft=request.known("data.sft") is True,
            cache_folder=request.known("data.data_cache_path"),
        )
        for name in dict.fromkeys(names)
    }


def _by_split(
    phases: Mapping[int, Mapping[str, Blend]], texts: Mapping[str, RawText]
) -> dict[str, tuple[str, ...]]:
    """Return the texts of each split, of all phases, once each; `all` is divided by --split."""
    found: dict[str, dict[str, None]] = {}
    for phase in phases.values():
        for split, blend in phase.items():
            read = {str(texts[name]): None for name in blend.prefixes if name in texts}
            found[split] = found.get(split, {}) | read
    return {split: tuple(names) for split, names in found.items() if names}


def _of_datasets(blend: Blend, texts: Mapping[str, RawText]) -> Blend:
    prefixes = (texts[name].prefix if name in texts else name for name in blend.prefixes)
    return dataclasses.replace(blend, prefixes=tuple(prefixes))


def _tokenizer_facts(request: Request) -> dict[str, Any]:
    config = request.config.tokenizer
    is_understood = all(map(is_resolved, vars(config).values()))
    if not is_understood or any(tokenizer_problems(config)):
        return {}  # The parser or the rule `vocabulary_is_known` reports it.
    tokenizer = load_tokenizer(config)
    tasks = request.known("training.eval_tasks")
    if tasks:
        requests_of_run(tuple(read_tasks(tasks, request.known("training.eval_tasks_limit"))), config)
    family = request.known("model.model_family")
    if family in MASKED_FAMILIES and not request.known("data.mock_data"):
        mask_vocabulary(tokenizer, needs_sentinels=family == "t5")
    return {
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod,
        "tokenizer_note": tokenizer.note,
        "pad_id": tokenizer.pad,
        "special_ids": tuple(sorted(tokenizer.special_ids)),
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that affect a run."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def plan_on_any_device(
    request: Request, facts: Facts, devices: Sequence[Literal["cpu", "cuda"]] = ("cuda", "cpu")
) -> Plan:
    """Resolve the plan for the first of these devices on which it resolves.

    Raises:
        ConfigError: it resolves on none; the problems of the device with the fewest.
    """
    errors = []
    for device in devices:
        num_devices = None if device == "cuda" else facts.devices_per_node
        try:
            return resolve(request, dataclasses.replace(facts, device=device, devices_per_node=num_devices))
        except ConfigError as error:
            errors.append(error)
    raise min(errors, key=lambda error: len(error.problems))
