"""`megatrain checkpoint average`: the mean of the weights of checkpoints, as a checkpoint of weights alone.

iter_0000100 ─┐  boxes of at most 64 MB
iter_0000200 ─┼─> mean in fp64, box by box ─> iter_0000300 of TARGET      LAWA (arXiv:2209.14981): steps of one run
iter_0000300 ─┘                                                           model soups (arXiv:2203.05482): several runs

The checkpoints may be of any layout. State and configuration are those of the last one, whose weights are evaluated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.find import find_checkpoints
from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.reader import CheckpointReader, TensorReader
from megatrain.config.errors import ConfigError
from megatrain.optim.sharded import WEIGHT
from megatrain.optim.update_rules import EMA
from megatrain.parallel.layout import Box
from megatrain.tools.checkpoint.rewrite import write_checkpoint
from megatrain.tools.checkpoint.source import no_checkpoint, opened


def average(arguments: argparse.Namespace) -> None:
    """Write the mean of the weights of several checkpoints as a checkpoint of weights alone."""
    paths = arguments.sources
    if arguments.last is not None:
        paths = _newest(paths, arguments.last)
    with ExitStack() as stack:
        readers = [stack.enter_context(opened(path)) for path in paths]
        mean = MeanReader(readers, EMA if arguments.ema else WEIGHT)
        print(
            f"mean of the {'averages' if arguments.ema else 'weights'} of {', '.join(str(one.path) for one in readers)}"
        )
        write_checkpoint(mean, arguments.target, None)


class MeanReader(TensorReader):
    """The mean of the weights of several checkpoints of the same model, each read box by box.

    Args:
        readers: checkpoints; the manifest is that of the last one, with weights alone.
        kind: `weight`, or `ema` for the averages that the runs kept. Frozen tensors have weights alone.

    Raises:
        MismatchError: the checkpoints have different tensors, or no averages.
    """

    def __init__(self, readers: Sequence[CheckpointReader], kind: str) -> None:
        self._readers, self._kind = readers, kind
        last = readers[-1]
        self.path, stored = last.path, last.manifest
        for reader in readers:
            found = reader.manifest.tensors
            differs = _shapes(reader.manifest).items() ^ _shapes(stored).items()
            if differs:
                raise MismatchError(
                    f"{reader.path} and {last.path} differ in the tensor {min(name for name, _ in differs)}",
                    fix="average checkpoints of the same model",
                )
            if not any(kind in tensor.kinds for tensor in found.values()):
                raise MismatchError(
                    f"{reader.path} has no averages of weights",
                    fix="train with --ema-decay, or average the weights without --ema",
                )
        self._manifest = replace(
            stored,
            optimizer_step_count=0,
            state={**stored.state, "has_optimizer": False},
            config={**stored.config, "training": {**stored.config["training"], "eval_with_ema": False}},
            tensors={
                name: replace(tensor, kinds={WEIGHT: tensor.kinds[WEIGHT]})
                for name, tensor in stored.tensors.items()
                if WEIGHT in tensor.kinds
            },
        )

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """See `TensorReader`; the mean is computed in fp64."""
        assert kind == WEIGHT, "there is no other kind"
        total, values = (torch.zeros(out.shape, dtype=torch.float64) for _ in range(2))
        for reader in self._readers:
            source = self._kind if self._kind in reader.manifest.tensors[name].kinds else WEIGHT
            reader.read_box(values, kind=source, name=name, shape=shape, box=box)
            total += values
        out.copy_(total / len(self._readers))


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in manifest.tensors.items() if WEIGHT in tensor.kinds}


def _newest(paths: Sequence[Path], count: int) -> list[Path]:
    """Return the newest intact checkpoints of a run, the newest last."""
    if len(paths) != 1:
        raise ConfigError(
            f"--last {count} of {len(paths)} folders",
            fix="give --last with one --save folder of a run",
        )
    found = sorted(
        (one for one in find_checkpoints(paths[0]) if one.problem is None), key=lambda one: one.iteration
    )
    if not found:
        raise no_checkpoint(paths[0])
    if len(found) < count:
        raise ConfigError(
            f"--last {count}: {paths[0]} has {len(found)} intact checkpoints",
            fix=f"use --last {len(found)} or less",
        )
    return [one.path for one in found[-count:]]
