"""Routed experts in place of an MLP, with a shared expert and latents of their inputs and outputs where a model has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.config.model_spec.linear import Linear, Piece
from megatrain.config.model_spec.mlp import mlp_linears


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of the experts of a layer."""

    num_experts: int
    top_k: int
    """Experts per token."""
    ffn_hidden_size: int
    """Width of each expert."""
    shared_ffn_hidden_size: int
    """Width of the shared expert; 0: none."""
    latent_size: int = 0
    """Width of the inputs and outputs of routed experts; 0: the hidden size."""

    @property
    def active_width(self) -> int:
        """Total MLP width that a token uses."""
        return self.top_k * self.ffn_hidden_size + self.shared_ffn_hidden_size

    def linears(self, hidden_size: int, *, is_gated: bool) -> Iterator[Linear]:
        """Yield the GEMMs of routed experts, of the shared expert and of the latents; the router's is none of them."""
        latent, shared = self.latent_size, self.shared_ffn_hidden_size
        yield from mlp_linears(
            latent or hidden_size, self.ffn_hidden_size, is_gated=is_gated, part="mlp.experts", module="mlp.experts",
            names="a routed expert", flags="--moe-ffn-hidden-size, --expert-tensor-parallel-size",
            num_experts=self.num_experts, top_k=self.top_k,
        )  # fmt: skip
        if shared:
            yield from mlp_linears(
                hidden_size, shared, is_gated=is_gated, part="mlp.shared", module="mlp.shared_experts",
                names="the shared expert",
                flags="--moe-shared-expert-intermediate-size, --tensor-model-parallel-size and the width of the MLP",
            )  # fmt: skip
        for name, module, inputs, outputs in (
            ("latent_down", "fc1_latent_proj", hidden_size, latent),
            ("latent_up", "fc2_latent_proj", latent, hidden_size),
        ):
            if latent:
                yield Linear(
                    part="mlp", pieces=(Piece(name, outputs),), inputs=inputs, split="none", reads="experts",
                    writes="experts", flags="--moe-latent-size", modules=(f"mlp.{module}",),
                )  # fmt: skip
