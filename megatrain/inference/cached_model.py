"""A model that generates text: the model of training, with attention that reads and extends a cache.

    new tokens of all sequences, packed [1, t] ─> embedding ─> layers ─> hidden [t, 1, h] ─> head of some rows ─> logits

An encoder computes the packed memory of the sequences that begin, [1, t]; the decoder's layers keep its keys and values. RoPE tables and learned positions follow each token's position in its sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.inference.cache import MEMORY, Cache, CachePlan, Reservation
from megatrain.inference.cached_attention import (
    CachedAttention,
    CachedDeltaRule,
    CachedLatentAttention,
    CachedMamba,
    CachedPass,
    CachedSparseAttention,
    CachedStates,
    DecodePass,
    DecodeRows,
)
from megatrain.inference.image_vectors import CachedImages, shifted
from megatrain.inference.memory_attention import CachedRows, PackedAttention
from megatrain.model.families.cross_attention import CrossAttention
from megatrain.model.families.decoder_start import DecoderStart
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.model.families.sparse_attention import IndexedAttention, SparseAttention
from megatrain.model.families.vision import ImagesInText
from megatrain.model.gpt import Model
from megatrain.model.head import Head
from megatrain.model.latent_attention import ExpandedAttention, LatentAttention
from megatrain.model.layer import Attention, RotaryEmbedding, TransformerLayer
from megatrain.model.linear_attention import LinearAttention
from megatrain.model.mamba import Mamba
from megatrain.model.mtp import MtpLayer
from megatrain.parallel.batch import Batch, EncoderTokens, PassInfo


@dataclass(frozen=True)
class NewTokens:
    """The next tokens of one sequence in a pass."""

    reservation: Reservation
    tokens: Sequence[int]
    first_position: int
    wants_all: bool = False
    """Logits of all of them are wanted; else of the last one alone."""
    memory: Sequence[int] = ()
    """Tokens of the encoder, with the first tokens of the sequence."""
    images: Tensor | None = None
    """Images [k, 3, height, width] whose vectors stand where tokens are below 0."""


class CachedModel:
    """Owner of a model and the cache of its sequences; the model serves no other purpose until `give_back`."""

    def __init__(self, model: Model, plan: CachePlan, device: torch.device) -> None:
        self.model, self.device = model, device
        self.cache = Cache(plan, device)
        ropes = {
            module: module.tables
            for segment in model.segments
            for module in segment.modules()
            if isinstance(module, RotaryEmbedding)
        }
        self._ropes = list(ropes.items())
        self._images, self._segments = _with_images(model)
        starts = (n for n, segment in enumerate(model.segments) if isinstance(segment, DecoderStart))
        self._decoder_start = next(starts, None)
        """Number of the segment after the encoder; None: the model has none."""
        self._states: list[CachedStates] = []
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        """Attention of training: its owner, its name there and itself."""
        self.can_decode = True
        """`decode` computes all layers: none has latents, states or an encoder before it."""
        mixers = [mixer for layer in _layers(self._segments) for mixer in _mixers(layer)]
        specs = [part for layer in model.spec.layers for part in layer.parts if part.role == "mixer"]
        for number, (mixer, spec) in enumerate(zip(mixers, specs, strict=True)):
            self._replace(mixer, spec, number)

    def _replace(self, mixer: nn.Module, spec: object, number: int) -> None:
        rows = self.cache.rows[number]
        if isinstance(mixer, LinearAttention | Mamba):
            kind = CachedMamba if isinstance(mixer, Mamba) else CachedDeltaRule
            core = kind(mixer.core, *self.cache.states[number])
            self._states.append(core)
            self.can_decode = False
            self._put(mixer, "core", core)
            return
        if isinstance(mixer, Attention | CrossAttention) and isinstance(mixer.core, MaskedAttention):
            self.can_decode = False
            self._put(mixer, "core", _masked_core(mixer.core, rows))
            return
        assert isinstance(spec, AttentionSpec)
        if isinstance(mixer, LatentAttention | SparseAttention):
            whole = mixer.attention
            self.can_decode = False
            if isinstance(whole, IndexedAttention):
                self._put(mixer, "attention", CachedSparseAttention(spec, whole, rows))
                return
            assert isinstance(whole, ExpandedAttention)
            self._put(mixer, "attention", CachedLatentAttention(spec, whole.up, whole.core, rows))
        else:
            assert isinstance(mixer, Attention)
            self._put(mixer, "core", CachedAttention(spec, mixer.core, rows))

    def _put(self, mixer: nn.Module, name: str, cached: nn.Module) -> None:
        self._replaced.append((mixer, name, getattr(mixer, name)))
        setattr(mixer, name, cached)

    def give_back(self) -> Model:
        """Return the model as it was; this object serves no purpose afterwards."""
        for mixer, name, whole in self._replaced:
            setattr(mixer, name, whole)
        for rope, tables in self._ropes:
            rope.tables = tables
        return self.model

    @torch.no_grad()
    def logits(self, parts: Sequence[NewTokens]) -> list[Tensor]:
        """Extend sequences; return logits of the tokens after the last one, or after each one, of every part: [n, v]."""
        lengths = [len(part.tokens) for part in parts]
        ids = self._row(self._with_vectors(parts))
        positions = self._row(
            range(part.first_position, part.first_position + len(part.tokens)) for part in parts
        )
        info = CachedPass(
            is_training=False,
            spaces=self.cache.extend([(one.reservation, len(one.tokens), len(one.memory)) for one in parts]),
            lengths=tuple(lengths),
            states=tuple(part.reservation.state for part in parts),
            memory_lengths=[len(part.memory) for part in parts if part.memory],
        )
        for one in self._states:
            one.begin_pass(info)
        memory = None
        if self._decoder_start is not None:
            spans = (range(length) for length in info.memory_lengths)
            memory = EncoderTokens(self._row(part.memory for part in parts), self._row(spans))
        hidden = self._hidden(ids, positions, info, memory)
        if self._images is not None:
            self._images.vectors = None
        ends = list(itertools.accumulate(lengths))
        counts = [length if part.wants_all else 1 for part, length in zip(parts, lengths, strict=True)]
        wanted = itertools.chain(*(range(end - n, end) for end, n in zip(ends, counts, strict=True)))
        rows = hidden[torch.tensor(list(wanted), device=self.device)]
        return list(self._head.logits(rows, info).squeeze(1).split(counts))

    @torch.no_grad()
    def decode(self, state: Tensor) -> Tensor:
        """Add one token to each sequence; return the logits of the next one, [b, v].

        Args:
            state: token, position, and for each space of the cache first row and number of rows before, int64 [2 + 2 spaces, b].
        """
        tokens, positions, *rows = state.unbind()
        spaces = {
            space: DecodeRows(first, count + 1, first + count)
            for space, first, count in zip(self.cache.plan.spaces, rows[::2], rows[1::2], strict=True)
        }
        info = DecodePass(is_training=False, rows=spaces)
        hidden = self._hidden(tokens[None], positions[None], info)
        logits: Tensor = self._head.logits(hidden, info)
        return logits.squeeze(1)

    def _with_vectors(self, parts: Sequence[NewTokens]) -> list[Sequence[int]]:
        """Compute the vectors of the images in a pass; return the tokens of its parts, whose places count through all images."""
        if self._images is None:
            return [part.tokens for part in parts]
        found: list[Sequence[int]] = []
        images: list[Tensor] = []
        assert self.model.spec.vision is not None
        for part in parts:
            first = self.model.spec.vision.tokens_per_image * sum(map(len, images))
            found.append(shifted(part.tokens, first))
            if part.images is not None and any(token < 0 for token in part.tokens):
                images.append(part.images)
        self._images.compute(images, self.device)
        return found

    @property
    def _head(self) -> Head:
        head = self.model.segments[-1]
        assert isinstance(head, Head)
        return head

    def _row(self, parts: Iterable[Sequence[int]]) -> Tensor:
        """Return numbers as one row, int64 [1, t]."""
        return torch.tensor([list(itertools.chain(*parts))], dtype=torch.int64, device=self.device)

    def _hidden(
        self, ids: Tensor, positions: Tensor, info: PassInfo, memory: EncoderTokens | None = None
    ) -> Tensor:
        """Return the hidden states [t, 1, h] of tokens [1, t] with these positions, after the encoder has computed its own."""
        unused = torch.zeros_like(ids)
        batch = Batch(
            tokens=ids, labels=unused, loss_mask=unused.float(), position_ids=positions, encoder=memory
        )
        hidden, layers = None, self._segments[:-1]
        if self._decoder_start is not None and memory is not None:
            start = layers[self._decoder_start]
            assert isinstance(start, DecoderStart)
            if memory.tokens.numel():
                self._rotate_by(memory.position_ids)
                hidden = _through(layers[: self._decoder_start + 1], None, batch, info)
            else:
                hidden = start.embedded(batch, info)
            layers = layers[self._decoder_start + 1 :]
        self._rotate_by(positions)
        return _through(layers, hidden, batch, info)[: ids.shape[1]]

    def _rotate_by(self, positions: Tensor) -> None:
        """Let RoPE apply positions [1, t]."""
        for rope, (cos, sin) in self._ropes:
            rope.tables = (cos[positions[0]], sin[positions[0]])


def hidden_states(model: Model, batch: Batch, info: PassInfo) -> Tensor:
    """Return the input of the head, [s, b, h]."""
    return _through(model.segments[:-1], None, batch, info)


def _through(segments: Sequence[nn.Module], hidden: Tensor | None, batch: Batch, info: PassInfo) -> Tensor:
    for segment in segments:
        hidden = segment(hidden, batch, info)
    assert hidden is not None
    return hidden


def _with_images(model: Model) -> tuple[CachedImages | None, list[nn.Module]]:
    """Return the segment that puts images into text, if the model has one, and all segments with it in place of the tower."""
    for number, segment in enumerate(model.segments):
        if isinstance(segment, ImagesInText):
            images = CachedImages(model.spec, model.segments[:number], segment)
            return images, [images, *model.segments[number + 1 :]]
    return None, model.segments


def _masked_core(core: MaskedAttention, rows: list[Tensor]) -> nn.Module:
    """Return what replaces attention of a family with an encoder."""
    if not rows:
        return PackedAttention(core)
    return CachedRows(core, rows, None if core.has_bias else MEMORY)


def _layers(segments: Sequence[nn.Module]) -> Iterator[TransformerLayer]:
    """Yield the layers in order, without layers of multi-token prediction, which generation does not compute."""
    for segment in segments:
        if not isinstance(segment, MtpLayer | CachedImages):
            yield from (module for module in segment.modules() if isinstance(module, TransformerLayer))


def _mixers(layer: TransformerLayer) -> Iterator[nn.Module]:
    kinds = (Attention, CrossAttention, LatentAttention, LinearAttention, Mamba, SparseAttention)
    return (branch for branch in layer.branches if isinstance(branch, kinds))
