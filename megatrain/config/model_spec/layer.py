"""A layer as data: its parts, each in a branch of the residual stream.

    pre   x + f(norm x)        post   x + norm(f x)        both   x + norm(f(norm x))

A layer of a GPT has two parts, a mixer and an MLP, one of T5's decoder cross-attention between them; a part that is missing
leaves the stream unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.cross_attention import CrossAttentionSpec
from megatrain.config.model_spec.delta_rule import LinearAttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.linear import Linear
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.norm import NormPosition
from megatrain.config.model_spec.part import Part, Role


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer."""

    parts: tuple[Part, ...]
    """In the order in which they run."""
    norm_position: NormPosition = "pre"
    is_parallel: bool = False
    """All branches read the input of the layer."""
    has_one_norm: bool = False
    """They read its norm, and have none of their own."""

    @property
    def mixer(self) -> Part | None:
        """The first part that reads other tokens."""
        return self._with_role("mixer")

    @property
    def mlp(self) -> Part | None:
        """The first part that computes each token by itself."""
        return self._with_role("mlp")

    @property
    def attention(self) -> AttentionSpec | None:
        return next((part for part in self.parts if isinstance(part, AttentionSpec)), None)

    @property
    def linear_attention(self) -> LinearAttentionSpec | None:
        return next((part for part in self.parts if isinstance(part, LinearAttentionSpec)), None)

    @property
    def dense(self) -> MlpSpec | None:
        """The MLP without experts."""
        return next((part for part in self.parts if isinstance(part, MlpSpec)), None)

    @property
    def experts(self) -> ExpertsSpec | None:
        return next((part for part in self.parts if isinstance(part, ExpertsSpec)), None)

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """All MLPs, routed and shared experts included."""
        found: list[MlpSpec] = []
        for part in self.parts:
            if isinstance(part, MlpSpec):
                found.append(part)
            elif isinstance(part, ExpertsSpec):
                found += [part.expert, *([] if part.shared is None else [part.shared])]
        return tuple(found)

    def with_part(self, part: Part) -> LayerSpec:
        """Return the layer with this part in place of the first one with its role; without one, mixers come first."""
        old = self._with_role(part.role)
        if old is not None:
            return self.replaced(old, part)
        return replace(self, parts=(part, *self.parts) if part.role == "mixer" else (*self.parts, part))

    def replaced(self, old: Part, new: Part) -> LayerSpec:
        """Return the layer with a part in place of this one."""
        return replace(self, parts=tuple(new if part is old else part for part in self.parts))

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the GEMMs of the layer."""
        return tuple(one for part in self.parts for one in part.linears(hidden_size))

    def active_weights(self, hidden_size: int) -> int:
        """Return the multiplications per token: those of GEMMs, and what Megatron-LM counts with them."""
        gemms = sum(one.active_weights for one in self.linears(hidden_size))
        return gemms + sum(part.other_weights(hidden_size) for part in self.parts)

    @property
    def pair_channels(self) -> int:
        """Channels of all heads in the two products of a pair of tokens: scores, and their use."""
        return sum(part.pair_channels for part in self.parts if not isinstance(part, CrossAttentionSpec))

    @property
    def memory_channels(self) -> int:
        """The same of a token and one of the memory."""
        return sum(part.pair_channels for part in self.parts if isinstance(part, CrossAttentionSpec))

    def _with_role(self, role: Role) -> Part | None:
        return next((part for part in self.parts if part.role == role), None)
