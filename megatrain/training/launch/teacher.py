"""The teacher of a run as facts: its checkpoint, found and described without reading its tensors, and the files about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatrain.checkpoint.find import newest_valid
from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.parts import read_manifest
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config import Request
from megatrain.config.derive.distillation import settings_of_file, teacher_settings
from megatrain.config.errors import ConfigError, MegatrainError, Problem
from megatrain.config.facts import TeacherFacts
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.training import HF_PREFIX
from megatrain.data.teacher_logits import read_logits_manifest
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.model.gpt import EMBEDDING_NAME
from megatrain.training.launch.foreign_checkpoints import foreign_candidates
from megatrain.training.launch.hf_folder import fix_of_transformers

_MODEL_CONFIG = "model_config.yaml"


def teacher_facts(request: Request) -> tuple[dict[str, Any], list[Problem]]:
    """Return the facts of the teacher, as fields of `Facts`, and the problems of its files; without a teacher, neither."""
    path = request.known("distillation.export_kd_teacher_load")
    cache = request.known("distillation.logits_load_dir")
    found: dict[str, Any] = {}
    try:
        if cache is not None:
            found["cached_logits"] = dataclasses.asdict(read_logits_manifest(Path(cache)))
        if path is None:
            return found, []
        found["teacher"] = _teacher(path, request)
        file = request.known("distillation.export_kd_cfg")
        if file is not None:
            settings = settings_of_file(file)
            given = {name for name in settings if request.origins[name].is_given}
            found["distillation_settings"] = {k: v for k, v in settings.items() if k not in given}
    except ConfigError as error:
        return found, list(error.problems)
    except MegatrainError as error:
        return found, [Problem(f"--export-kd-teacher-load: {one.text}", one.fix) for one in error.problems]
    return found, []


def _opened(path: str, *, allows_format_torch: bool) -> HfCheckpoint | MegatronCheckpoint | None:
    """Open a teacher that another program wrote; return None for one of ours. Raises MegatrainError."""
    if path.startswith(HF_PREFIX):
        return HfCheckpoint(Path(path.removeprefix(HF_PREFIX)))
    candidates = foreign_candidates((Path(path),))
    if not candidates:
        return None
    return MegatronCheckpoint(candidates[0].path, None, allows_format_torch=allows_format_torch)


def _teacher(path: str, request: Request) -> TeacherFacts:
    reader = _opened(path, allows_format_torch=bool(request.known("checkpoint.allow_pickle")))
    manifest = _own_manifest(Path(path)) if reader is None else reader.manifest
    for name, kind in (("model", ModelConfig), ("experts", ExpertsConfig)):
        stored_section(Path(path), manifest.config, name, kind)
    return TeacherFacts(
        path=path,
        iteration=manifest.iteration,
        config={name: manifest.config[name] for name in ("model", "experts")},
        num_rows=_num_rows(reader, manifest),
        is_ours=reader is None,
        tokenizer_fingerprint=manifest.state.get("tokenizer_fingerprint") if reader is None else None,
        checksum=manifest.checksum,
        described=_described(path, request),
    )


def _num_rows(reader: HfCheckpoint | MegatronCheckpoint | None, manifest: Manifest) -> int:
    if isinstance(reader, HfCheckpoint):
        return reader.num_rows
    if isinstance(reader, MegatronCheckpoint):
        return reader.padded_vocab_size
    return manifest.tensors[EMBEDDING_NAME].shape[0]


def _own_manifest(path: Path) -> Manifest:
    newest = newest_valid(path)
    if newest is None:
        raise ConfigError(
            f"--export-kd-teacher-load {path} {'has no valid checkpoint' if path.exists() else 'does not exist'}",
            fix=fix_of_transformers("--export-kd-teacher-load", path)
            or "name a folder of checkpoints, one of its iter_NNNNNNN folders, or hf:FOLDER with a folder of transformers",
        )
    return read_manifest(newest.path)


def _described(path: str, request: Request) -> dict[str, Any]:
    """Return the settings that a file about the teacher gives."""
    file = request.known("distillation.export_kd_teacher_model_config")
    default = Path(path.removeprefix(HF_PREFIX)) / _MODEL_CONFIG
    if file is None and default.is_file():
        file = str(default)
    return {} if file is None else teacher_settings(file)
