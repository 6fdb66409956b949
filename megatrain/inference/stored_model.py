"""The model of a checkpoint, in one process.

    newest intact checkpoint ─> config, tokenizer ─> model without memory ─> compared with the tensors ─> weights

The configuration in a checkpoint is untrusted: it is data. It is compared with the tensors before memory is allocated, and the
function of custom layers, which is code, comes from the user's --spec alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.checkpoint.errors import DamagedError
from megatrain.checkpoint.find import Candidate, check_folder, list_candidates
from megatrain.checkpoint.load import check_names, load_weights_only, restore_expert_biases
from megatrain.checkpoint.manifest import Manifest
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.errors import ConfigError, MegatrainError, NoCheckpointError
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.model.custom_layers import apply_custom_layers
from megatrain.model.gpt import Model, build_model
from megatrain.model.specs import gpt_spec
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape


@dataclass(frozen=True)
class LoadedModel:
    """A model loaded from a checkpoint."""

    model: Model
    tokenizer: Tokenizer
    max_context: int
    """Longest context in tokens: the sequence length of training."""
    path: Path
    iteration: int
    skipped: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that is damaged."""


def load_model(
    folder: Path, *, spec: Sequence[str] = (), device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """Load the newest intact checkpoint in `folder`, or the one of FOLDER/iter_0000100.

    Args:
        spec: words of --spec, for a model with custom layers.

    Raises:
        NoCheckpointError: the folder has none.
        MismatchError: another version of the program wrote it.
        ConfigError: the tokenizer has changed since training, or `spec` does not match the checkpoint.
    """
    skipped: list[str] = []
    for candidate in list_candidates(folder):
        try:
            loaded = _load(candidate, tuple(spec), device=device, dtype=dtype)
        except DamagedError as error:
            skipped.append(f"skipped iteration {candidate.iteration}: {error.problems[0].text}")
            continue
        return dataclasses.replace(loaded, skipped=tuple(skipped))
    raise NoCheckpointError(
        f"--load {folder} has no valid checkpoint" + "".join(f"\n  {line}" for line in skipped),
        fix="set --load to the --save folder of pretrain.py, or to one of its iter_NNNNNNN folders; `megatrain checkpoint"
        " ls FOLDER` lists them",
    )


def _load(
    candidate: Candidate, spec: tuple[str, ...], *, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    path = candidate.path
    if candidate.problem is not None:
        raise DamagedError(f"{path}: {candidate.problem}")
    manifest = check_folder(path, candidate.iteration)
    tokenizer = _tokenizer(path, manifest)
    model = build_stored_model(
        path, manifest, vocab_size=tokenizer.vocab_size, spec=spec, device=device, dtype=dtype
    )
    return LoadedModel(model, tokenizer, _seq_length(path, manifest), path, manifest.iteration)


def build_stored_model(
    path: Path,
    manifest: Manifest,
    *,
    vocab_size: int,
    spec: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """Build the model that a manifest describes, and load its weights.

    Raises:
        DamagedError: configuration and tensors contradict each other.
        ConfigError: `spec` does not match the checkpoint.
    """
    config = _with_user_spec(path, stored_section(path, manifest.config, "model", ModelConfig), spec)
    experts = stored_section(path, manifest.config, "experts", ExpertsConfig)
    grid, seq_length = build_grid(GridShape(), 0), _seq_length(path, manifest)
    with _untrusted_configuration(path):
        described = apply_custom_layers(gpt_spec(config, experts, vocab_size=vocab_size), config)
        build = functools.partial(
            build_model, described, grid, seq_length=seq_length, sequence_parallel=False, dtype=dtype
        )
        with CheckpointReader(path, manifest) as reader:
            check_names(reader, build(device=torch.device("meta")).registry, lambda _: (WEIGHT,))
    model = build(device=device)
    buffers = allocate_buffers(
        model.registry, grid=grid, weight_dtype=dtype, grad_dtype=dtype, device=device, has_gradients=False
    )
    load_weights_only(path, buffers)
    restore_expert_biases(model, manifest.state, path)
    return model


def _seq_length(path: Path, manifest: Manifest) -> int:
    found: int = stored_section(path, manifest.config, "data", DataConfig).seq_length
    return found


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


def _with_user_spec(path: Path, config: ModelConfig, spec: tuple[str, ...]) -> ModelConfig:
    """Return the settings of the model with --spec as the user gives it. `apply_custom_layers` compares its digest."""
    function = layer_function(config.spec)
    if (function is not None) == bool(spec):
        return dataclasses.replace(config, spec=spec or config.spec)
    if function is None:
        raise ConfigError(
            f"--spec {' '.join(spec)}: the model of {path} has no custom layers", fix="remove --spec"
        )
    raise ConfigError(
        f"{path}: its model has custom layers of {function}, and no code is run that only a checkpoint names",
        fix=f"add --spec {function} if you trust that code",
    )


def _tokenizer(path: Path, manifest: Manifest) -> Tokenizer:
    config: TokenizerConfig = stored_section(path, manifest.config, "tokenizer", TokenizerConfig)
    fingerprint = manifest.state["tokenizer_fingerprint"]
    tokenizer_type = config.tokenizer_type or "NullTokenizer"
    tokenizer = load_tokenizer(dataclasses.replace(config, tokenizer_type=tokenizer_type))
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ConfigError(
            f"--tokenizer-model {config.tokenizer_model}: not the tokenizer of the training run",
            fix="restore the tokenizer file of the training run",
        )
    return tokenizer
