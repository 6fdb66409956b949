"""The model of a checkpoint, in one process or split over tensor ranks.

    newest intact checkpoint ─> config, tokenizer ─> model without memory ─> compared with the tensors ─> weights
    folder of transformers ───> (interop/ reads it as a checkpoint)

The configuration in a checkpoint is untrusted: it is data. It is compared with the tensors before memory is allocated, and the
function of custom layers, which is code, comes from the user's --spec alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.adaptation import merged
from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.find import Candidate, check_folder, list_candidates
from megatrain.checkpoint.load import check_names, restore_expert_biases
from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.reader import CheckpointReader, CheckpointSource, TensorReader
from megatrain.checkpoint.stored_tokenizer import stored_tokenizer
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.vision import sample_length
from megatrain.config.errors import ConfigError, MegatrainError, NoCheckpointError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.optimizer import PrecisionConfig
from megatrain.config.schema.quantization import SCALE_PREFIX, QuantizationFormat
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.tree import Config
from megatrain.config.schema.vision import VisionConfig
from megatrain.config.subjects.model_spec import describe_model
from megatrain.config.subjects.post_training.quantization import format_of_training, split_group
from megatrain.data.images.pixels import Tiling, tiling_of
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.tensor_split import split_over_ranks, without_capacity
from megatrain.model.custom_layers import apply_custom_layers
from megatrain.model.gpt import Model, build_model
from megatrain.optim.sharded import WEIGHT, fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import MakeHandle, build_grid
from megatrain.parallel.grid import RankGrid
from megatrain.parallel.layout import ParamRegistry


@dataclass(frozen=True)
class TensorRanks:
    """This process, one of the tensor ranks that a model is split over."""

    size: int = 1
    rank: int = 0
    make_handle: MakeHandle | None = None
    """Creates the process groups; None: the ranks cannot communicate."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a stored model is built.

    Attributes:
        spec: words of --spec, for a model with custom layers.
        spec_digest: digest of the file of --spec; None: the digest of the checkpoint.
        is_unlimited: experts have no capacity, so that no token depends on other sequences.
        is_rounded: with --qat linear layers round as in evaluations of its training.
    """

    device: torch.device
    dtype: torch.dtype
    spec: tuple[str, ...] = ()
    spec_digest: str | None = None
    ranks: TensorRanks = TensorRanks()
    is_unlimited: bool = False
    is_rounded: bool = False


@dataclass(frozen=True)
class LoadedModel:
    """A model loaded from a checkpoint."""

    model: Model
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    """Tokens that end a text: the end-of-document token, and those that the files of a model list."""
    max_context: int
    """Longest context in tokens: the sequence length of training. Of an encoder, if the model has one."""
    start_id: int | None
    """First token of a decoder whose encoder reads the prompt; None: the tokenizer has none."""
    dtype: torch.dtype
    path: Path
    iteration: int
    tiling: Tiling
    """How images are resized, cut and normalized."""
    tokenizer_config: TokenizerConfig
    chat_template: str | None = None
    """See `StoredTokenizer`."""
    skipped: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is damaged."""


def load_model(folder: Path, options: ModelOptions) -> LoadedModel:
    """Load the newest intact checkpoint in `folder`, or the one of FOLDER/iter_0000100.

    Raises:
        NoCheckpointError: the folder has none.
        MismatchError: another version of the program wrote it.
        ConfigError: the tokenizer has changed since training, or `options` do not match the checkpoint.
    """
    skipped: list[str] = []
    for candidate in list_candidates(folder):
        try:
            loaded = _load(candidate, options)
        except DamagedError as error:
            skipped.append(f"skipped iteration {candidate.iteration}: {error.problems[0].text}")
            continue
        return dataclasses.replace(loaded, skipped=tuple(skipped))
    raise NoCheckpointError(
        f"--load {folder} {'has no valid checkpoint' if folder.exists() else 'does not exist'}"
        + "".join(f"\n  {line}" for line in skipped),
        fix="set --load to the --save folder of pretrain.py, to one of its iter_NNNNNNN folders, or to a folder of"
        " transformers with config.json; `megatrain checkpoint ls FOLDER` lists checkpoints",
    )


def _load(candidate: Candidate, options: ModelOptions) -> LoadedModel:
    path = candidate.path
    if candidate.problem is not None:
        raise DamagedError(f"{path}: {candidate.problem}")
    with CheckpointReader(path, check_folder(path, candidate.iteration)) as reader:
        return load_tensors(reader, options)


def load_tensors(reader: TensorReader, options: ModelOptions) -> LoadedModel:
    """Load the model and the tokenizer that a reader's manifest describes.

    Raises:
        DamagedError: configuration and tensors contradict each other.
        ConfigError: the tokenizer has changed since training, or `options` do not match the checkpoint.
    """
    path, manifest = reader.path, reader.manifest
    stored = stored_tokenizer(path, manifest)
    model = build_stored_model(reader, options, vocab_size=stored.vocab_size)
    return LoadedModel(
        model=model,
        tokenizer=stored.tokenizer,
        end_ids=stored.end_ids,
        max_context=_seq_length(path, manifest),
        start_id=stored.start_id,
        dtype=options.dtype,
        path=path,
        iteration=manifest.iteration,
        tiling=tiling_of(stored_section(path, manifest.config, "vision", VisionConfig)),
        tokenizer_config=stored.config,
        chat_template=stored.chat_template,
    )


def build_stored_model(reader: TensorReader, options: ModelOptions, *, vocab_size: int) -> Model:
    """Build the model that a reader's manifest describes, and load its weights.

    Raises:
        DamagedError: configuration and tensors contradict each other.
        ConfigError: `options` do not match the checkpoint.
    """
    reader = merged(reader)
    model, grid = build_without_weights(reader, options, vocab_size=vocab_size)
    load_weights(model.registry, reader, grid, options)
    return model


def load_weights(
    registry: ParamRegistry, reader: TensorReader, grid: RankGrid, options: ModelOptions
) -> None:
    """Allocate the parameters of a registry, and read them."""
    buffers = allocate_buffers(registry, grid=grid, weight_dtype=options.dtype, device=options.device)
    fill_weights(buffers, CheckpointSource(reader, WEIGHT))
    reader.finish()


def build_without_weights(
    reader: TensorReader, options: ModelOptions, *, vocab_size: int
) -> tuple[Model, RankGrid]:
    """Build the model that a reader's manifest describes; its parameters have no memory. Raises as `build_stored_model`."""
    path, manifest, ranks = reader.path, reader.manifest, options.ranks
    config = _with_user_spec(path, stored_section(path, manifest.config, "model", ModelConfig), options)
    vision: VisionConfig = stored_section(path, manifest.config, "vision", VisionConfig)
    vision = dataclasses.replace(vision, spread_images=False)
    experts = stored_section(path, manifest.config, "experts", ExpertsConfig)
    kind: dict[str, Any] = {
        "seq_length": max(_seq_length(path, manifest), config.decoder_seq_length or 0),
        "sequence_parallel": False,
        "dtype": options.dtype,
    }
    with _untrusted_configuration(path):
        described = apply_custom_layers(
            describe_model(config, experts, vision, vocab_size=vocab_size), config
        )
        described = without_capacity(described) if options.is_unlimited else described
        described, shape = split_over_ranks(described, ranks.size)
        kind["qat"] = _rounding(path, manifest, described, ranks.size) if options.is_rounded else None
        silent = build_grid(shape, ranks.rank)
        registry = build_model(described, silent, device=torch.device("meta"), **kind).registry
        check_names(reader, registry, lambda _: (WEIGHT,))
    grid = build_grid(shape, ranks.rank, ranks.make_handle)
    model = build_model(described, grid, device=options.device, **kind)
    restore_expert_biases(model, manifest.state.get("expert_biases", {}), path)
    return model, grid


def _rounding(path: Path, manifest: Manifest, spec: ModelSpec, tp_size: int) -> QuantizationFormat | None:
    """Return the format of --qat, if the checkpoint has its scales."""
    numbers = format_of_training(stored_section(path, manifest.config, "precision", PrecisionConfig))
    if numbers is None or not any(name.startswith(SCALE_PREFIX) for name in manifest.tensors):
        return None
    size = numbers.weights.group_size
    if size is not None and split_group(spec, size, tp_size) is not None:
        raise ConfigError(
            f"{tp_size} tensor ranks: groups of {size} weights (--qat-group-size) do not divide over them",
            fix="start fewer ranks (--nproc-per-node of torchrun), or one process without torchrun",
        )
    return numbers


def _seq_length(path: Path, manifest: Manifest) -> int:
    """Return the tokens of the longest sample, with those of its images."""
    data = stored_section(path, manifest.config, "data", DataConfig)
    model = stored_section(path, manifest.config, "model", ModelConfig)
    vision = stored_section(path, manifest.config, "vision", VisionConfig)
    return sample_length(Config(model=model, data=data, vision=vision))


@contextmanager
def _untrusted_configuration(path: Path) -> Iterator[None]:
    """Turn errors into a DamagedError: settings contradict each other, or describe other tensors than the checkpoint has."""
    try:
        yield
    except ConfigError:
        raise  # of the user's --spec
    except MegatrainError as error:
        raise DamagedError(f"its configuration is of another model: {error.problems[0].text}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DamagedError(f"{path}: its configuration describes no model ({reason})") from error


def _with_user_spec(path: Path, config: ModelConfig, options: ModelOptions) -> ModelConfig:
    """Return the settings of the model with --spec as the user gives it; compare the digest of its file, which is not run."""
    function, given = layer_function(config.spec), layer_function(options.spec)
    if function is None:
        if options.spec or options.spec_digest is not None:
            raise ConfigError(
                f"--spec and --spec-digest: the model of {path} has no custom layers",
                fix="remove --spec and --spec-digest",
            )
        return config
    if given is None:
        raise ConfigError(
            f"{path}: its model has custom layers of {function}, and no code is run that only a checkpoint names",
            fix=f"add --spec {function} if you trust that code",
        )
    digest = given.digest(
        given=options.spec_digest, stored=config.spec_digest, before=function, flag="--spec-digest {digest}"
    )
    return dataclasses.replace(config, spec=options.spec, spec_digest=digest)
