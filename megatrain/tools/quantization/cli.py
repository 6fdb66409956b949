"""`megatrain quantize`: writes a checkpoint as a folder of transformers whose linear layers are quantized.

    checkpoint ─> its export ─> layer 0, 1, 2 ...: [inputs of a calibration] ─> rounded ─> a file ─> folder for transformers and vllm

A layer has memory at a time. A command that was stopped continues after the last layer that it had finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.manifest import DTYPES
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.optimizer import PrecisionConfig
from megatrain.config.schema.quantization import QUANTIZATION_FORMATS, QuantizationFormat
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.config_file import CONFIG_NAME
from megatrain.interop.hf.export import HfExport
from megatrain.interop.hf.tokenizer_files import json_bytes
from megatrain.tools.calibration_set import read_samples
from megatrain.tools.checkpoint.rewrite import DTYPE_NAMES
from megatrain.tools.checkpoint.source import size_text
from megatrain.tools.generation.load import opened_source
from megatrain.tools.quantization.calibration import Calibration
from megatrain.tools.quantization.folder import PartialFolder
from megatrain.tools.quantization.layer import ChangedTensors, LayerRounding
from megatrain.tools.quantization.plan import (
    Options,
    format_of,
    plan_tensors,
    quantization_config,
)
from megatrain.tools.subcommands import add_command
from megatrain.training.logging.console import Console

_LONGEST: Final = 2048
"""Default limit of the tokens of a sample."""


def add_flags(commands: Any) -> None:
    """Add the subcommand."""
    command = add_command(commands, "quantize", run)
    command.add("source PATH", "checkpoint of megatrain or Megatron-LM, or hf:FOLDER of transformers")
    command.add("target TARGET", "folder to write to", of=Path)
    formats = "; ".join(f"{name}: {one.text}" for name, one in QUANTIZATION_FORMATS.items())
    command.add("--format NAME", formats, required=True)
    command.add(
        "--method",
        "rounding to nearest (default), GPTQ, or AWQ; the last two read --calibration-data",
        "rtn",
        choices=("rtn", "gptq", "awq"),
    )
    command.add("--group-size N", "inputs of a group of int4 (default: 128)", of=int, at_least=1)
    command.add("--calibration-data PREFIX", "dataset, PREFIX.bin and PREFIX.idx")
    command.add("--calibration-samples N", "samples of it", 128, at_least=1)
    command.add(
        "--calibration-length N",
        f"tokens of a sample (default: the sequence length of training, at most {_LONGEST})",
        of=int,
        at_least=1,
    )
    command.add("--kv-cache-scales", "write FP8 scales of keys and values, with --calibration-data")
    command.add("--device", "device", "cpu", choices=("cpu", "cuda"))
    command.add(
        "--dtype",
        "dtype of scales and of other tensors (default: that of the weights in training, or in the files)",
        "auto",
        choices=("auto", *DTYPE_NAMES),
    )
    command.add("--architecture NAME", "class of transformers (default: the first that computes the same)")


def run(arguments: argparse.Namespace) -> None:
    """Write a checkpoint as a folder that transformers and vllm read with compressed-tensors: its linear layers are
    quantized, its embedding, head and norms are not. A command that was stopped continues.
    """
    numbers = format_of(arguments.format, arguments.group_size, arguments.method)
    needs_data = arguments.method != "rtn" or arguments.kv_cache_scales
    if needs_data and arguments.calibration_data is None:
        flag = "--kv-cache-scales" if arguments.method == "rtn" else f"--method {arguments.method}"
        raise ConfigError(f"{flag} needs data", fix="add --calibration-data")
    if not needs_data and arguments.calibration_data is not None:
        raise ConfigError(
            "--calibration-data has no effect with --method rtn", fix="remove it, or use --method gptq or awq"
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU", fix="use --device cpu")
    console = Console()
    with opened_source(arguments.source, console.print) as reader:
        tensors = ChangedTensors(reader)
        own = reader.family.architecture if isinstance(reader, HfCheckpoint) else None
        export = HfExport(tensors, arguments.architecture or own)
        dtype, qat = _dtype(arguments, reader, export), _format_of_training(arguments, reader)
        if qat is not None and arguments.group_size is None:
            numbers = qat
        options = Options(
            name=arguments.format,
            format=numbers,
            method=arguments.method,
            has_cache_scales=arguments.kv_cache_scales,
            dtype=dtype,
            device=torch.device(arguments.device),
            keeps_scales=numbers == qat and dtype == _params_dtype(reader),
        )
        if options.keeps_scales:
            console.print("> the scales are those that training with --qat has kept")
        plan = plan_tensors(export, options)
        tokens = _tokens(arguments, reader, export.vocab_size) if options.is_calibrated else None
        description = _description(arguments, options, reader, tokens)
        folder = PartialFolder(arguments.target, description, plan.num_files)
        _quantize(LayerRounding(export, tensors, plan, options), folder, tokens, console)


def _quantize(
    rounding: LayerRounding, folder: PartialFolder, tokens: Tensor | None, console: Console
) -> None:
    """Write all files."""
    plan, options, export = rounding.plan, rounding.options, rounding.export
    if folder.done:
        console.print(f"> continuing with layer {folder.done} of {len(plan.layers)}")
    folder.begin()
    calibration = None
    if tokens is not None:
        calibration = Calibration(
            rounding.tensors, tokens, folder.path, vocab_size=export.vocab_size, device=options.device
        )
    if folder.done is None:
        metas = [
            (name, torch.empty(export.tensors[name].shape, dtype=options.dtype, device="meta"))
            for name in plan.others
        ]
        folder.write(0, metas, lambda: (rounding.plain(name) for name in plan.others))
        if calibration is not None:
            calibration.embed()
        folder.finish_layer(0)
    assert folder.done is not None
    for layer in range(folder.done, len(plan.layers)):
        _quantize_layer(rounding, folder, calibration, layer, console)
    console.remove_bar()
    small = export.small_files(next(name for name, dtype in DTYPES.items() if dtype == options.dtype))
    config = json.loads(small[CONFIG_NAME]) | {"quantization_config": quantization_config(plan, options)}
    num_bytes = folder.complete(small | {CONFIG_NAME: json_bytes(config)})
    console.print(
        f"{folder.target}: {export.family.architecture}, {len(plan.linears)} weights in {options.name} ({options.method}),"
        f" {size_text(num_bytes)}"
    )


def _quantize_layer(
    rounding: LayerRounding,
    folder: PartialFolder,
    calibration: Calibration | None,
    layer: int,
    console: Console,
) -> None:
    """Write the file of a layer, and the hidden states after it."""
    total = len(rounding.plan.layers)

    def show(done: float) -> None:
        console.show_bar(
            done=round(100 * (layer + done)), total=100 * total, status=f"layer {layer} of {total}"
        )

    show(0.0)
    statistics = None if calibration is None else calibration.statistics(layer, lambda part: show(0.4 * part))
    tensors = rounding.files_tensors(layer, statistics)
    folder.write(layer + 1, tensors.items(), lambda: iter(tensors.values()))
    if calibration is not None:
        if layer + 1 < total:
            calibration.advance(layer, lambda part: show(0.6 + 0.4 * part))
        calibration.forget(layer - 1)
    folder.finish_layer(layer + 1)
    if calibration is not None and layer + 1 == total:
        calibration.forget(layer)
    rounding.tensors.changed.clear()


def _dtype(arguments: argparse.Namespace, reader: TensorReader, export: HfExport) -> torch.dtype:
    """Return the dtype of what is not quantized. A checkpoint of ours has master weights, wider than those of a pass."""
    if arguments.dtype != "auto":
        return DTYPES[DTYPE_NAMES[arguments.dtype]]
    found = _params_dtype(reader) or DTYPES[export.kind(*_embedding(export), "weight").dtype]
    return torch.float32 if found == torch.float64 else found


def _precision(reader: TensorReader) -> PrecisionConfig | None:
    """Return the precision of a training of ours."""
    if not isinstance(reader, CheckpointReader):
        return None
    found: PrecisionConfig = stored_section(reader.path, reader.manifest.config, "precision", PrecisionConfig)
    return found


def _params_dtype(reader: TensorReader) -> torch.dtype | None:
    precision = _precision(reader)
    return None if precision is None else getattr(torch, precision.params_dtype)


def _format_of_training(arguments: argparse.Namespace, reader: TensorReader) -> QuantizationFormat | None:
    """Return the format of --qat if it is the one that is asked for."""
    precision = _precision(reader)
    name: str = arguments.format
    if precision is None or precision.qat != name or arguments.method != "rtn":
        return None
    has_groups = QUANTIZATION_FORMATS[name].weights.strategy == "group"
    return format_of(name, precision.qat_group_size if has_groups else None, "rtn")


def _embedding(export: HfExport) -> tuple[str, tuple[int, ...]]:
    name = next(
        name
        for name, one in export.tensors.items()
        if one.parts and one.parts[0].name.startswith("embedding.")
    )
    return name, export.tensors[name].shape


def _tokens(arguments: argparse.Namespace, reader: TensorReader, vocab_size: int) -> Tensor:
    data: DataConfig = stored_section(reader.path, reader.manifest.config, "data", DataConfig)
    length = arguments.calibration_length or min(data.seq_length, _LONGEST)
    if length > data.seq_length:
        raise ConfigError(
            f"--calibration-length {length}: the model is trained with samples of {data.seq_length} tokens",
            fix=f"use --calibration-length {data.seq_length} or less",
        )
    return read_samples(
        arguments.calibration_data,
        reader,
        flag="--calibration-data",
        remedy="lower --calibration-samples or --calibration-length",
        count=arguments.calibration_samples,
        length=length,
        vocab_size=vocab_size,
    )


def _description(
    arguments: argparse.Namespace, options: Options, reader: TensorReader, tokens: Tensor | None
) -> dict[str, Any]:
    """Return what a command that continues must repeat."""
    files = sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in reader.path.rglob("*")
        if path.is_file()
    )
    return {
        "version": 1,
        "source": str(reader.path.resolve()),
        "iteration": reader.manifest.iteration,
        "files": zlib.crc32(repr(files).encode()),
        "format": options.name,
        "numbers": dataclasses.asdict(options.format.weights),
        "method": options.method,
        "kv_cache_scales": options.has_cache_scales,
        "dtype": str(options.dtype),
        "architecture": arguments.architecture,
        "tokens": None if tokens is None else [*tokens.shape, zlib.crc32(tokens.numpy().data)],
    }
