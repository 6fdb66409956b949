"""A whole model as data: its stacks of layers, what feeds them, and its head.

FLOPs, each a multiply and an add, forward and twice in backward (times 6):

    per token and layer    h*(q + 2k)  queries, keys, values      q = heads * channels, twice with an output gate
                           q*h         attention output           k = groups * channels
                           m*h*f       the MLP                    m = 3 if gated, else 2; f of experts: all active widths
                           m*l*f + 2hl routed experts with latents of l channels, and their projections
                           `Part.other_weights` of convolutions and states
    per token              h*v         the output layer           v = padded vocabulary
    and depth of multi-token prediction: one layer more, the output layer once more, 2h*h for the projection, 3h
    per pair of tokens     q           scores and their use: the causal half of two products

    with MLA               cq*(h + n*d + 1) + ck*(h + n*(dp + dv) + 1) + h*(dr + n*dv), and n*(d + dv)/2 per pair; ranks
                           cq and ck, heads n, channels dp plain, dr rotary, d = dp + dr, values dv; 1 for the norms

Recomputation, norms, softmax and embedding are not counted. Source: Megatron-LM, training/training.py; its numbers
are in tests/golden. It treats --quick-geglu as not gated, and counts windows as whole sequences; only the latter is
done here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from megatrain.config.model_spec.attention import AttentionSpec, SparseAttentionSpec
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.lora import LoraSpec
from megatrain.config.model_spec.mamba import MambaSpec
from megatrain.config.model_spec.mlp import AttentionReplacementSpec, MlpReplacementSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.part import Part
from megatrain.config.model_spec.stack import HeadSpec, Stack
from megatrain.config.model_spec.vision import VisionSpec


@dataclass(frozen=True, kw_only=True)
class MtpSpec:
    """Multi-token prediction: depths of layers; each predicts one token further ahead."""

    num_depths: int
    loss_factor: float
    """Factor of the mean of their losses."""
    layers: tuple[LayerSpec, ...] = ()
    """Layers of a depth; empty: one like the last layer of the model."""
    is_repeated: bool = False
    """All depths use the weights of the first."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A whole model, the same on all ranks, before each builds its part."""

    hidden_size: int
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    padded_vocab_size: int
    stacks: tuple[Stack, ...]
    """In the order in which they run."""
    is_tied: bool
    """The head uses the embedding's weight."""
    init_std: float
    output_init_std: float
    """Standard deviation for layers whose output is added to the residual stream."""
    embedding_init_std: float | None = None
    """Standard deviation for the embedding; None: `init_std`."""
    head_init_std: float | None = None
    """Standard deviation for an untied output weight; None: `init_std`."""
    norm: NormSpec = field(default_factory=NormSpec)
    num_positions: int | None = None
    """Rows of the learned position embedding; None: none."""
    num_token_types: int | None = None
    """Rows of the embedding of token types; None: none."""
    head: HeadSpec = field(default_factory=HeadSpec)
    embedding_multiplier: float = 1.0
    """Factor of the embedding's output, rounded to the weights' dtype first, as in Gemma."""
    width_multiplier: float = 1.0
    """Second factor of the embedding's output, not rounded (muP)."""
    hidden_dropout: float = 0.0
    """Dropout probability of the outputs of the branches and the embedding."""
    is_residual_fp32: bool = False
    """The residual stream is in the accumulation dtype, not in that of the weights."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_softcap: float | None = None
    """Limit of the logits: cap * tanh(logit / cap); None: no limit."""
    z_loss_coeff: float = 0.0
    """Coefficient of the squared log-sum-exp of each token's logits, which is added to its loss."""
    mtp: MtpSpec | None = None
    """Multi-token prediction; None: none."""
    vision: VisionSpec | None = None
    """Vision tower and projector, whose vectors stand in the sequence; None: the model reads text alone."""
    lora: LoraSpec | None = None
    """Adapters of linear layers; None: all weights are trained."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Layers of all stacks; a layer's number is its place here."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    def with_layers(self, layers: Sequence[LayerSpec]) -> ModelSpec:
        """Return the model with other layers, as many as before unless it has one stack."""
        if len(self.stacks) == 1:
            return replace(self, stacks=(replace(self.stacks[0], layers=tuple(layers)),))
        rest = iter(layers)
        return replace(self, stacks=tuple(stack.with_layers(rest) for stack in self.stacks))

    @property
    def num_depths(self) -> int:
        """Depths of multi-token prediction."""
        return 0 if self.mtp is None else self.mtp.num_depths

    @property
    def depth_layers(self) -> tuple[LayerSpec, ...]:
        """Layers of each depth of multi-token prediction."""
        if self.mtp is None:
            return ()
        return self.mtp.layers or self.layers[-1:]

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Layers by number, with those of multi-token prediction."""
        return self.layers + self.mtp_layers

    @property
    def mtp_layers(self) -> tuple[LayerSpec, ...]:
        """Layers of multi-token prediction with weights of their own. Their numbers follow those of the other layers."""
        if self.mtp is None or not self.mtp.is_repeated:
            return self.depth_layers * self.num_depths
        return tuple(_of_uses(layer, self.num_depths) for layer in self.depth_layers)

    @property
    def used_mtp_layers(self) -> tuple[LayerSpec, ...]:
        """The same, each as often as a pass uses it."""
        return self.mtp_layers * (len(self.depth_layers) * self.num_depths // max(len(self.mtp_layers), 1))

    def layer_name(self, number: int) -> str:
        """Return the prefix of the canonical names of a layer."""
        for stack in self.stacks:
            if number < len(stack.layers):
                return f"{stack.name}.layers.{number}"
            number -= len(stack.layers)
        if self.mtp is None or not self.mtp.layers:
            return f"mtp.layers.{number}"
        depth, number = divmod(number, len(self.mtp.layers))
        return f"mtp.layers.{depth}.layers.{number}"

    def decoder_stage(self, layers: Sequence[int]) -> int | None:
        """Return the virtual stage with the first layer of a decoder after an encoder; None: the model has one stack.

        Args:
            layers: number of layers of each virtual stage.
        """
        if len(self.stacks) == 1:
            return None
        ends = accumulate(layers)
        return next(stage for stage, end in enumerate(ends) if end > len(self.stacks[0].layers))

    def stack_of(self, number: int) -> Stack:
        """Return the stack of a layer; that of multi-token prediction is the last one."""
        for stack in self.stacks:
            if number < len(stack.layers):
                return stack
            number -= len(stack.layers)
        return self.stacks[-1]

    @property
    def routers(self) -> dict[int, RouterSpec]:
        """Return the routers by layer number."""
        return {
            number: layer.experts.router
            for number, layer in enumerate(self.all_layers)
            if layer.experts is not None
        }

    @property
    def num_trained_indexers(self) -> int:
        """Number of layers with sparse attention whose indexer adds to the loss."""
        parts = [part for layer in self.all_layers for part in layer.parts]
        return sum(isinstance(part, SparseAttentionSpec) and part.indexer.loss_coeff > 0 for part in parts)

    @property
    def routers_by_name(self) -> dict[str, RouterSpec]:
        """Return the same routers, in the same order, by the prefix of their canonical names."""
        return {f"{self.layer_name(number)}.mlp.router": router for number, router in self.routers.items()}

    def training_flops(self, *, num_tokens: int, sum_of_squared_lengths: int) -> int:
        """Return the FLOPs of forward and backward over documents of these lengths, all samples alike for several stacks."""
        mean_length = sum_of_squared_lengths // num_tokens
        num_samples = num_tokens**2 // sum_of_squared_lengths
        tokens, flops = num_tokens, 0
        for stack in self.stacks:
            tokens, pairs = num_tokens, sum_of_squared_lengths
            if stack.seq_length is not None:
                tokens, pairs = num_samples * stack.seq_length, num_samples * stack.seq_length**2
            layers = stack.layers
            if stack is self.stacks[-1]:
                layers += self.depth_layers * self.num_depths
            flops += 6 * tokens * sum(layer.active_weights(self.hidden_size) for layer in layers)
            flops += 3 * pairs * sum(layer.pair_channels for layer in layers)
            flops += 3 * tokens * mean_length * sum(layer.memory_channels for layer in layers)
        depths = self.num_depths
        head = self.hidden_size * self.padded_vocab_size * (1 + depths) + depths * self._projection_weights
        flops += 6 * tokens * head
        if self.vision is not None:
            flops += num_samples * sum(self.vision.flops_of_layers(self.hidden_size))
        return flops

    def flops_per_token(self, length: int) -> tuple[list[int], int]:
        """Return the FLOPs per token of each layer and of the head, forward and backward, for samples of this length without documents.

        Multi-token prediction counts as part of the head. A stack with another length counts per token of a sample of the data.
        """
        h = self.hidden_size

        def flops(layer: LayerSpec, own: int) -> int:
            weights = 6 * layer.active_weights(h)
            return weights + 3 * (own * layer.pair_channels + length * layer.memory_channels)

        layers = [
            flops(layer, stack.seq_length or length) * (stack.seq_length or length) // length
            for stack in self.stacks
            for layer in stack.layers
        ]
        head = 6 * h * self.padded_vocab_size
        of_depth = sum(flops(layer, length) for layer in self.depth_layers)
        mtp = of_depth + 6 * self._projection_weights + head
        return layers, head * (self.stacks[-1].seq_length or length) // length + self.num_depths * mtp

    def vision_flops_per_token(self, length: int) -> tuple[int, ...]:
        """Return the FLOPs per token of a sample of each layer of the vision tower; a frozen one is not split."""
        if self.vision is None:
            return ()
        flops = self.vision.flops_of_layers(self.hidden_size)
        return tuple(one // length for one in ([sum(flops)] if self.vision.is_tower_frozen else flops))

    @property
    def _projection_weights(self) -> int:
        """Weights of the projection and the norms that a depth of multi-token prediction adds to a layer."""
        return 2 * self.hidden_size**2 + 3 * self.hidden_size

    def __str__(self) -> str:
        count = len(self.layers)
        groups = [layer.attention.num_query_groups for layer in self.layers if layer.attention is not None]
        widths = [layer.dense.ffn_hidden_size for layer in self.layers if layer.dense is not None]
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        parts = [
            f"{count} layers",
            f"query groups {_span(groups)}" if groups else "",
            f"ffn {_span(widths)}" if widths else "",
            _describe_experts(experts, count),
            *self._counted_parts(),
            f"{len(self.mtp_layers)} more for multi-token prediction" if self.mtp_layers else "",
        ]
        return ", ".join(part for part in parts if part)

    def _counted_parts(self) -> Iterator[str]:
        """Yield the numbers of layers with some parts and, unless each has one part as in a hybrid, without usual ones."""
        kinds = Counter(type(part) for layer in self.layers for part in layer.parts)
        is_hybrid = all(len(layer.parts) == 1 for layer in self.layers)
        names: dict[type[Part], str] = {LinearAttentionSpec: "linear attention", MambaSpec: "Mamba-2"}
        if is_hybrid:
            names[AttentionSpec] = "attention"
        names |= {
            AttentionReplacementSpec: "a linear layer as attention",
            MlpReplacementSpec: "a linear layer as MLP",
        }
        names |= {kind: kind.__name__ for kind in kinds if kind.module is not None}
        yield from (f"{kinds[kind]} with {name}" for kind, name in names.items() if kinds[kind])
        if not is_hybrid:
            yield _missing(sum(layer.mixer is None for layer in self.layers), "attention")
            yield _missing(sum(layer.mlp is None for layer in self.layers), "MLP")


def _of_uses(layer: LayerSpec, num_uses: int) -> LayerSpec:
    """Return a layer that a pass uses several times: each use has an equal part of the coefficients of its router."""
    if layer.experts is None:
        return layer
    router = layer.experts.router
    losses = tuple((loss, coeff / num_uses) for loss, coeff in router.losses)
    router = replace(router, losses=losses, z_loss_coeff=router.z_loss_coeff / num_uses)
    return layer.replaced(layer.experts, replace(layer.experts, router=router))


def _describe_experts(experts: Sequence[ExpertsSpec], num_layers: int) -> str:
    if not experts:
        return ""
    one = experts[0]
    shared = f" and {one.shared_ffn_hidden_size} shared" if one.shared is not None else ""
    latent = f" on {one.latent_size} latent channels" if one.latent_size else ""
    where = "" if len(experts) == num_layers else f" in {len(experts)} layers"
    return f"{one.num_experts} experts of {one.ffn_hidden_size}{latent}{shared}, {one.top_k} a token{where}"


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _missing(count: int, name: str) -> str:
    return f"{count} without {name}" if count else ""
