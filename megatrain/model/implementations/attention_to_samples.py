"""Core attention of `local` to keys of whole samples, which every context rank expands from gathered latents."""

from __future__ import annotations

from torch import Tensor

from megatrain.model.implementations.attention import LocalContextAttention
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.latent_context import attend_to_samples


class LocalAttentionToSamples(LocalContextAttention):
    """Attention of this rank's rows and heads to keys and values of whole samples; values are `padded`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: PassInfo) -> Tensor:
        out = attend_to_samples(q, k, v, self.kernel, self.masks(q, info), self.context.ring)
        return out[..., : self.value_channels].flatten(2)
