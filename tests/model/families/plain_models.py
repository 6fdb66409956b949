"""BERT, T5 and vision-language models in plain PyTorch, written from the description of Megatron-LM's models and from no code: the answer in fp64.

Weights have canonical names. The description is that of the recorded runs (`../../training/test_recorded_families.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.vision import VisionConfig
from megatrain.parallel.batch import Batch


@dataclass(frozen=True)
class PlainModel:
    """A model by its settings; `weights` in fp64."""

    model: ModelConfig
    vision: VisionConfig
    weights: Mapping[str, Tensor]

    def token_losses(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each token, [b, s], and for BERT the mean loss of the order of sentences."""
        if self.model.model_family == "bert":
            x = self._encoded(batch.tokens, batch)
            y = self._norm(F.gelu(self._linear(x, "lm_head.dense")), "lm_head.norm")
            order = None
            if not self.model.bert_no_binary_head:
                classes = self._linear(torch.tanh(self._linear(x[:, 0], "pooler.dense")), "binary_head")
                order = F.cross_entropy(classes, batch.are_swapped)
            return self._cross_entropy(y, batch), order
        if self.model.model_family == "t5":
            assert batch.encoder is not None
            memory = self._encoded(batch.encoder.tokens, batch)
            return self._cross_entropy(self._decoded(batch, memory), batch), None
        return self._cross_entropy(self._decoded(self._with_images(batch), None), batch), None

    def _encoded(self, tokens: Tensor, batch: Batch) -> Tensor:
        assert batch.is_token is not None
        x = self._embedded(tokens)
        if batch.types is not None and "embedding.tokentype_embeddings.weight" in self.weights:
            x = x + self.weights["embedding.tokentype_embeddings.weight"][batch.types]
        bias = self._relative("encoder", x.shape[1], is_causal=False)
        for number in range(self.model.num_layers):
            x = self._layer(x, f"encoder.layers.{number}", batch.is_token[:, None, None], bias=bias)
        return self._norm(x, "encoder.final_norm")

    def _decoded(self, inputs: Batch | Tensor, memory: Tensor | None) -> Tensor:
        x = self._embedded(inputs.tokens) if isinstance(inputs, Batch) else inputs
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        bias = self._relative("decoder", x.shape[1], is_causal=True)
        num_layers = self.model.num_layers if memory is not None else self.model.decoder_num_layers
        assert num_layers is not None
        for number in range(num_layers):
            name = f"decoder.layers.{number}"
            x = x + self._attention(
                self._norm(x, f"{name}.attention.norm"), f"{name}.attention", mask, bias=bias
            )
            if memory is not None:
                assert isinstance(inputs, Batch)
                assert inputs.is_token is not None
                y, keys = self._norm(x, f"{name}.cross_attention.norm"), inputs.is_token[:, None, None]
                x = x + self._attention(y, f"{name}.cross_attention", keys, memory)
            x = x + self._mlp(self._norm(x, f"{name}.mlp.norm"), f"{name}.mlp")
        return self._norm(x, "decoder.final_norm")

    def _with_images(self, batch: Batch) -> Tensor:
        """Return the images' vectors, then the words', whose positions are those of the words alone."""
        assert batch.images is not None
        patches = F.conv2d(
            batch.images[:, 0].double(), self.weights["vision.patch_embedding.weight"].view(-1, 3, *[self.vision.patch_dim] * 2),
            stride=self.vision.patch_dim,
        ).flatten(2).mT  # fmt: skip
        first = self.weights["vision.class_token.weight"].view(1, 1, -1).expand(len(patches), 1, -1)
        x = torch.cat([first, patches], 1) + self.weights["vision.position_embeddings.weight"]
        x = self._norm(x, "vision.pre_norm")
        for number in range(self.model.num_layers):
            x = self._layer(x, f"vision.layers.{number}", torch.ones(1, 1).bool(), is_rotated=False)
        x = x[:, 1:] if self.vision.disable_vision_class_token else x
        if self.vision.vision_projection_norm:
            x = self._norm(x, "vision.projector.norm")
        count = x.shape[1]
        words = self.weights["embedding.word_embeddings.weight"][batch.tokens[:, count:]]
        if self.model.position_embedding_type == "learned_absolute":
            words = (
                words + self.weights["embedding.position_embeddings.weight"][batch.position_ids[:, count:]]
            )
        return torch.cat([self._mlp(x, "vision.projector"), words], 1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        if self.model.position_embedding_type == "learned_absolute":
            x = x + self.weights["embedding.position_embeddings.weight"][: x.shape[1]]
        return x

    def _layer(
        self, x: Tensor, name: str, mask: Tensor, *, bias: Tensor | None = None, is_rotated: bool = True
    ) -> Tensor:
        y = self._norm(x, f"{name}.attention.norm")
        x = x + self._attention(y, f"{name}.attention", mask, bias=bias, is_rotated=is_rotated)
        return x + self._mlp(self._norm(x, f"{name}.mlp.norm"), f"{name}.mlp")

    def _attention(
        self,
        x: Tensor,
        name: str,
        mask: Tensor,
        memory: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        is_rotated: bool = True,
    ) -> Tensor:
        channels = self.model.kv_channels
        source = x if memory is None else memory
        q, k, v = (
            self._linear(one, f"{name}.{part}").unflatten(-1, (-1, channels))
            for one, part in ((x, "q"), (source, "k"), (source, "v"))
        )
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        if is_rotated and memory is None and self.model.position_embedding_type == "rope":
            q, k = self._rotated(q), self._rotated(k)
        k, v = (one.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for one in (k, v))
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(channels)
        scores = scores if bias is None else scores + bias
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self._linear(torch.einsum("bnst,btnd->bsnd", probs, v).flatten(2), f"{name}.proj")

    def _rotated(self, x: Tensor) -> Tensor:
        count = int(self.model.kv_channels * self.model.rotary_percent)
        rates = float(self.model.rotary_base) ** (-torch.arange(0, count, 2).double() / count)
        angles = torch.outer(torch.arange(x.shape[1]).double(), rates)[:, None]
        first, second, rest = x[..., : count // 2], x[..., count // 2 : count], x[..., count:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def _relative(self, stack: str, length: int, *, is_causal: bool) -> Tensor | None:
        table = self.weights.get(f"{stack}.relative_positions.weight")
        if table is None:
            return None
        buckets, reach = self.model.relative_attention_num_buckets, self.model.relative_attention_max_distance
        rows = []
        for distance in range(1 - length, length):  # from a query to a key
            count = buckets if is_causal else buckets // 2
            start = 0 if is_causal or distance <= 0 else count
            near = max(0, -distance) if is_causal else abs(distance)
            exact = count // 2
            bucket = near
            if near >= exact:
                share = math.log(near / exact) / math.log(reach / exact)
                bucket = min(count - 1, exact + int(share * (count - exact)))
            rows.append(start + bucket)
        places = torch.arange(length)
        return table[torch.tensor(rows)][places[None] - places[:, None] + length - 1].permute(2, 0, 1)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up = self._linear(x, f"{name}.up")
        if self.model.swiglu:
            up = F.silu(self._linear(x, f"{name}.gate")) * up
        elif self.model.squared_relu:
            up = F.relu(up) ** 2
        else:
            is_fused = not (self.model.disable_bias_linear or self.model.no_bias_gelu_fusion)
            up = F.gelu(up, approximate="tanh" if is_fused else "none")
        return self._linear(up, f"{name}.down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"] + self.model.apply_layernorm_1p
        if self.model.normalization == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.model.norm_epsilon)
        return F.layer_norm(x, weight.shape, weight, self.weights[f"{name}.bias"], self.model.norm_epsilon)

    def _cross_entropy(self, x: Tensor, batch: Batch) -> Tensor:
        table = self.weights.get("output_layer.weight", self.weights["embedding.word_embeddings.weight"])
        logits = F.linear(x, table, self.weights.get("output_layer.bias"))
        return F.cross_entropy(logits.mT, batch.labels.clamp(min=0), reduction="none")
