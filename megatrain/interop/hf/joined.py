"""A vision tower and a language model from two folders, joined by a new projector: the start of a vision-language model.

tower ─ layers up to the feature layer ─┐
new projector, initial values ──────────┼─> the manifest and the tensors of a checkpoint at iteration 0
language model ─────────────────────────┘   an output layer that was tied to the embedding begins as a copy of it
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Final

from torch import Tensor

from megatrain.checkpoint.manifest import Manifest, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.derive.vision import PROJECTOR, TOWER
from megatrain.config.errors import ConfigError, InputError
from megatrain.interop.foreign_run import stored_state
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.settings import flags_of, plan_of, registry_of
from megatrain.model.gpt import EMBEDDING_NAME, OUTPUT_NAME
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.layout import Box, BoxRange, ParamLayout, Piece

FEATURE_LAYERS: Final = {"clip": -2, "siglip": -1}
"""Layer whose output the projector reads, counted from the end, as in LLaVA."""


class JoinedModel(TensorReader):
    """Reads boxes of both models' canonical tensors, and initial values of the projector.

    Args:
        tower: folder of CLIPVisionModel or SiglipVisionModel, or of the model with its text encoder.
        language: folder of a language model.
        feature_layer: layer of the tower, counted from the end; None: as in LLaVA.
        seed: seed of the projector's initial values.

    Raises:
        InputError: a folder is damaged, or holds another kind of model.
        ConfigError: the tower has no such layer.
    """

    def __init__(
        self, tower: Path, language: Path, *, vocab_size: int | None, feature_layer: int | None, seed: int
    ) -> None:
        self.path = language
        self._tower = HfCheckpoint(tower, is_tower=True)
        self.language = HfCheckpoint(language, vocab_size)
        family = self.language.settings.get("model.model_family", "gpt")
        if family != "gpt":
            raise InputError(
                f"{language}: {self.language.family.architecture} is of --model-family {family}",
                fix="name a folder of a language model",
            )
        of_tower = {key: one for key, one in self._tower.settings.items() if key.startswith("vision.")}
        depth = of_tower["vision.vision_num_layers"]
        wanted = FEATURE_LAYERS[of_tower["vision.vision_model_type"]]
        wanted = wanted if feature_layer is None else feature_layer
        if not -depth <= wanted <= -1:
            raise ConfigError(
                f"--feature-layer {wanted}: the tower of {tower} has {depth} layers",
                fix=f"use --feature-layer -1, the last one, to {-depth}",
            )
        self.settings = {
            **self.language.settings,
            **of_tower,
            "vision.vision_num_layers": depth + 1 + wanted,
            "model.model_family": "vlm",
            "model.untie_embeddings_and_output_weights": True,
        }
        self.vocab_size = self.language.vocab_size
        self._plan = plan_of(self.settings, self.vocab_size, self.language.path)
        entries = registry_of(self._plan.config, self.vocab_size).entries.values()
        self._pieces: dict[str, tuple[ParamLayout, Piece]] = {
            piece.name: (entry.layout, piece) for entry in entries for piece in entry.layout.pieces
        }
        self._initial = InitialWeights(seed)

    @property
    def flags(self) -> list[str]:
        """Return the flags of the model."""
        return flags_of(self.settings)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Counters, state, configuration and tensors, without files."""
        config = self._plan.config.to_dict()
        base = self.language.manifest
        config["tokenizer"] = base.config["tokenizer"]
        tensors = {name: self._stored(name, piece.shape) for name, (_, piece) in self._pieces.items()}
        return Manifest.of_weights(
            state=stored_state(
                self._plan,
                expert_biases=base.state["expert_biases"],
                end_token_ids=base.state["end_token_ids"],
            ),
            config=config,
            tensors=tensors,
            checksum=zlib.crc32(repr((config["model"], config["vision"], tensors)).encode()),
        )

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy a box into `out`, which has the shape of the box and any float dtype."""
        if name.startswith(f"{PROJECTOR}."):
            layout, piece = self._pieces[name]
            self._initial.fill(out, layout, BoxRange(piece, box, 0))
            return
        reader, theirs = self._home(name)
        reader.read_box(out, kind=kind, name=theirs, shape=shape, box=box)

    def _home(self, name: str) -> tuple[HfCheckpoint, str]:
        """Return the folder that has a tensor, and its name there."""
        if name.startswith(f"{TOWER}."):
            return self._tower, name
        is_tied = name == OUTPUT_NAME and OUTPUT_NAME not in self.language.manifest.tensors
        return self.language, EMBEDDING_NAME if is_tied else name

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name.startswith(f"{PROJECTOR}."):
            return StoredTensor(shape, {WEIGHT: self._stored(EMBEDDING_NAME, ()).kinds[WEIGHT]})
        reader, theirs = self._home(name)
        found = reader.manifest.tensors[theirs]
        if shape not in ((), found.shape):
            raise InputError(
                f"{reader.path}: {name} has shape {list(found.shape)}, and with images the model has {list(shape)}",
                fix="join a language model without learned positions, or one with more of them",
            )
        return found
