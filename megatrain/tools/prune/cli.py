"""`megatrain prune`: a checkpoint of a smaller model, of the parts of a trained one that matter most.

--load ─> sizes, checked ─> calibration set ─> importance ─> kept parts ─> --save, at iteration 0
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import torch

from megatrain.checkpoint.find import base_folder, folder_name
from megatrain.checkpoint.reader import TensorReader
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.environment import read_environment
from megatrain.config.errors import ConfigError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.tree import flag_of
from megatrain.tools.calibration_set import read_samples
from megatrain.tools.checkpoint.rewrite import write_checkpoint
from megatrain.tools.generation.load import chosen_device, opened_source
from megatrain.tools.prune.measure import Calibration, measured
from megatrain.tools.prune.pruned import Kept, PrunedCheckpoint
from megatrain.tools.prune.sizes import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    SHARED_FFN,
    Source,
    indivisible,
    target_sizes,
)
from megatrain.tools.subcommands import add_command

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_TARGETS: Final = {
    LAYERS: "layers to keep",
    HIDDEN: "channels of the stream to keep",
    HEADS: "attention heads to keep in each layer",
    GROUPS: "query groups to keep in each layer (default: as many as before; of heads without groups, as many as heads)",
    FFN: "neurons of each MLP to keep",
    EXPERTS: "routed experts to keep in each layer",
    EXPERT_FFN: "neurons of each routed expert to keep",
    SHARED_FFN: "neurons of each shared expert to keep",
}


def add_flags(commands: Any) -> None:
    """Add the subcommand."""
    command = add_command(commands, "prune", run)
    command.add(
        "--load FOLDER",
        "checkpoint of the source: --save folder of a run, one of its iter_NNNNNNN folders, a folder of transformers, or a"
        " checkpoint of Megatron-LM (torch_dist)",
        required=True,
    )
    command.add("--save FOLDER", "folder for the checkpoint and importance.npz", of=Path, required=True)
    command.add("--data-path PREFIX", "calibration set: PREFIX.bin and PREFIX.idx", required=True)
    command.add("--samples N", "samples of the calibration set", 128, at_least=1)
    command.add(
        "--seq-length N", "tokens of a sample (default: those of the source's training)", of=int, at_least=1
    )
    for path, text in _TARGETS.items():
        command.add(f"{flag_of(path)} N", text, of=int)
    command.add(
        "--parameters N",
        "most parameters, such as 4e9: hidden size and widths of MLPs that are not given shrink alike",
        of=float,
        above=0,
    )
    command.add(
        "--layer-importance",
        "score of a layer: 1 - cosine of its input and output, or the loss of the model without it, for which the whole"
        " model is in memory",
        "influence",
        choices=("influence", "loss"),
    )
    command.add("--device", "device (default: cuda where there is a GPU, else cpu)", choices=("cpu", "cuda"))
    command.add(
        "--dtype", "dtype of the passes (default: bf16 on GPUs, fp32 on the CPU)", choices=tuple(_DTYPES)
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure the importance of layers, heads, neurons, channels and experts on a calibration set, and write a checkpoint
    with the most important ones. It trains on with --finetune, best with the source as its teacher
    (--export-kd-teacher-load).
    """
    save: Path = arguments.save
    if base_folder(save) != save or (save / folder_name(0)).exists():
        raise ConfigError(f"--save {save} has a checkpoint", fix="name another folder with --save")
    with opened_source(arguments.load, print) as reader:
        prune(reader, arguments)


def prune(reader: TensorReader, arguments: argparse.Namespace) -> None:
    """Write the pruned checkpoint of a source. Raises ConfigError before it reads a tensor."""
    source = Source.of(reader)
    given = {path: getattr(arguments, path.rpartition(".")[2]) for path in _TARGETS}
    targets = {path: value for path, value in given.items() if value is not None}
    parameters = None if arguments.parameters is None else int(arguments.parameters)
    sizes = target_sizes(source, targets, parameters)
    length = (
        arguments.seq_length
        or stored_section(reader.path, reader.manifest.config, "data", DataConfig).seq_length
    )
    positions = source.spec.num_positions
    if positions is not None and length > positions:
        raise ConfigError(
            f"--seq-length {length}: the model has {positions} learned positions",
            fix=f"use --seq-length {positions}",
        )
    device = chosen_device(arguments.device, read_environment())
    default = "bf16" if device.type == "cuda" else "fp32"
    calibration = Calibration(
        samples=read_samples(
            arguments.data_path,
            reader,
            flag="--data-path",
            remedy="use fewer --samples, a shorter --seq-length",
            count=arguments.samples,
            length=length + 1,
            vocab_size=source.vocab_size,
        ),
        by_loss=arguments.layer_importance == "loss",
        device=device,
        dtype=_DTYPES[arguments.dtype or default],
    )
    arguments.save.mkdir(parents=True, exist_ok=True)
    scores = measured(source, reader, calibration, arguments.save)
    pruned = PrunedCheckpoint(reader, source, sizes, Kept.of(source, sizes, scores))
    write_checkpoint(pruned, arguments.save, None)
    _tell(source, pruned)


def _tell(source: Source, pruned: PrunedCheckpoint) -> None:
    """Print what was kept, the sizes that do not divide over later ranks, and how to train on."""
    for path, size in pruned.sizes.items():
        if size != source.sizes[path]:
            print(f"{flag_of(path)} {size} of {source.sizes[path]}")
    if len(pruned.kept.layers) < source.sizes[LAYERS]:
        print(f"layers {', '.join(map(str, pruned.kept.layers))} are kept")
    before, after = source.num_parameters, pruned.target.num_parameters
    print(f"{after} of {before} parameters ({after / before:.1%})")
    for line in indivisible(pruned.target.spec):
        print(line)
    print(
        "train on with --load of this folder, --finetune and --use-checkpoint-args, which takes the flags of the model from it;"
        " --export-kd-teacher-load with the source heals it sooner"
    )
