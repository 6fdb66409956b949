"""Measures the importance of a checkpoint's parts: the model, or one layer after the other, computes the calibration set.

    samples ─> parts of the set ─> stage by stage of a pipeline on this process alone ─> sums ─> importance.npz next to the output

A model that fits in half of the free memory is one stage; otherwise each layer is one, which is read for each part of the set, and
the stream of that part waits in host memory.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from megatrain.checkpoint.load import restore_expert_biases
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.errors import ConfigError
from megatrain.inference.stored_model import ModelOptions, load_weights
from megatrain.model.gpt import Model, build_model, equal_stages
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.process.available_memory import available_bytes
from megatrain.storage.files import replace_file
from megatrain.tools.prune.importance import Importance
from megatrain.tools.prune.sizes import Source
from megatrain.training.logging.console import Console

FILE_NAME: Final = "importance.npz"
_SAMPLES_PER_SAVE: Final = 16
"""Samples of a part of the set, of a model that is one stage."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The calibration set, and how the model computes it."""

    samples: Tensor
    """Tokens and the label of the last one, int64 [n, s + 1]."""
    by_loss: bool
    device: torch.device
    dtype: torch.dtype


def measured(
    source: Source, reader: TensorReader, calibration: Calibration, folder: Path
) -> Mapping[str, Tensor]:
    """Return the sums of `Importance`; what `folder` has of them already is not measured again.

    Raises:
        ConfigError: it has those of another model or calibration set.
    """
    file, key = folder / FILE_NAME, _key(reader, calibration)
    importance = Importance(len(source.spec.layers), by_loss=calibration.by_loss)
    done = _read(file, key, importance) if file.exists() else 0
    passes = _Passes(source, reader, calibration, importance)
    total, console = len(calibration.samples), Console()
    try:
        while done < total:
            part = range(done, min(done + passes.samples_at_a_time, total))
            for computed in passes.run(calibration.samples[part.start : part.stop]):
                status = f"measuring, {part.start} of {total} samples"
                console.show_bar(
                    done=round(100 * (part.start + computed * len(part)) / total), total=100, status=status
                )
            done = part.stop
            _write(file, key, importance, done)
    finally:
        console.remove_bar()
    return importance.sums


class _Passes:
    """The model, whole or layer by layer, whose passes `importance` watches."""

    def __init__(
        self, source: Source, reader: TensorReader, calibration: Calibration, importance: Importance
    ) -> None:
        self._source, self._reader, self._spec = source, reader, source.spec
        self._calibration, self._importance = calibration, importance
        device, item = calibration.device, calibration.dtype.itemsize
        host = available_bytes()
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
        needed = item * source.num_parameters
        is_whole = calibration.by_loss or needed <= free // 2
        self._num_stages = 1 if is_whole else len(self._spec.layers)
        stream = item * calibration.samples.shape[1] * self._spec.hidden_size
        self.samples_at_a_time = _SAMPLES_PER_SAVE if is_whole else max(1, host // 4 // stream)
        self._stage = functools.lru_cache(1)(self._load_stage)

    @torch.no_grad()
    def run(self, samples: Tensor) -> Iterator[float]:
        """Compute samples [n, s + 1]; yield the computed share after each stage of a sample."""
        batches = [_batch(sample[None], self._calibration.device) for sample in samples]
        streams: list[Tensor | None] = [None] * len(batches)
        steps = self._num_stages * len(batches)
        for stage in range(self._num_stages):
            model = self._stage(stage)
            is_last = stage == self._num_stages - 1
            for number, batch in enumerate(batches):
                info = PassInfo(is_training=False)
                hidden = streams[number]
                hidden = None if hidden is None else hidden.to(self._calibration.device)
                for segment in model.segments[: -1 if is_last else None]:
                    hidden = segment(hidden, batch, info)
                assert hidden is not None
                streams[number] = None if is_last else hidden.cpu()
                if self._calibration.by_loss:
                    self._importance.add_losses(model, batch, info)
                yield (stage * len(batches) + number + 1) / steps

    def _load_stage(self, number: int) -> Model:
        """Return the model of a stage, with its weights."""
        calibration, source = self._calibration, self._source
        grid = build_grid(GridShape(pp=self._num_stages), number)
        stages = equal_stages(len(self._spec.layers), self._num_stages)
        model = build_model(
            self._spec,
            grid,
            seq_length=calibration.samples.shape[1] - 1,
            sequence_parallel=False,
            dtype=calibration.dtype,
            device=calibration.device,
            stages=stages,
        )
        options = ModelOptions(device=calibration.device, dtype=calibration.dtype)
        load_weights(model.registry, self._reader, grid, options)
        biases, known = self._reader.manifest.state["expert_biases"], model.expert_biases.state()
        restore_expert_biases(model, {name: biases[name] for name in known if name in biases}, source.path)
        self._importance.watch(model, stages[number])
        return model


def _batch(samples: Tensor, device: torch.device) -> Batch:
    samples = samples.to(device)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones_like(tokens, dtype=torch.float32),
        position_ids=positions,
    )


def _key(reader: TensorReader, calibration: Calibration) -> str:
    """Return what the sums depend on."""
    digest = hashlib.sha256(calibration.samples.numpy().tobytes()).hexdigest()
    by = "loss" if calibration.by_loss else "influence"
    return json.dumps(
        [reader.manifest.checksum, digest, list(calibration.samples.shape), by, str(calibration.dtype)]
    )


def _read(file: Path, key: str, importance: Importance) -> int:
    """Fill `importance` from a file; return the samples that it covers."""
    try:
        with np.load(file, allow_pickle=False) as content:
            found = {name: content[name] for name in content.files}
        stored, done = str(found.pop("key")), int(found.pop("done"))
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{file}: is damaged ({str(error)[:200]})", fix="remove it: it is measured again"
        ) from error
    if stored != key:
        raise ConfigError(
            f"{file} is of another source, calibration set or --layer-importance",
            fix="remove it, or name another folder with --save",
        )
    importance.sums |= {name: torch.from_numpy(values) for name, values in found.items()}
    return done


def _write(file: Path, key: str, importance: Importance, done: int) -> None:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: value.numpy() for name, value in importance.sums.items()}
    np.savez(buffer, key=np.array(key), done=np.array(done), **arrays)
    replace_file(file, [buffer.getvalue()])
