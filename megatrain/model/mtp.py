"""Multi-token prediction: further layers; each predicts one token further ahead than the one before.

    hidden states of depth k - 1 ────── norm ─┐
    embedding of the token k ahead ──── norm ─┴─ concatenation ─ projection ─ layer ─ norm ─> hidden states of depth k

Depth 0 is the model itself, after its final norm. Embedding and head are those of the model: the head computes the loss of
every depth (`head.py`), against the label k positions further ahead. Evaluation and generation use depth 0 alone.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2; the norms are placed as in Megatron-LM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain.config.model_spec.model import ModelSpec
from megatrain.model.embedding import Embedding
from megatrain.model.implementations.module_builder import ModuleBuilder
from megatrain.model.layouts import Columns, LinearLayout, columns_layout, norm_weights
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.column_gather import gather_columns
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class MtpLayer(ShardedModule):
    """The segment of one depth: hidden states of all depths before, concatenated, [k s/tp, b, h] -> [(k + 1) s/tp, b, h].

    Args:
        depth: k - 1, from 0.
        model_norm: final norm of the model, applied by the first depth; None for the others.
        embedding: embedding of this rank.
        owns_embedding: the embedding belongs to this segment; else to another one of this rank.
        embedding_output: pointwise modules applied to the embedded tokens.
        layer: the transformer layer.
        hidden_dtype: dtype of the residual stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        depth: int,
        *,
        model_norm: nn.Module | None,
        embedding: Embedding,
        owns_embedding: bool,
        embedding_output: nn.Module,
        layer: nn.Module,
        builder: ModuleBuilder,
        tp: TensorParallel,
        hidden_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.depth, self.tp, self.hidden_dtype = depth, tp, hidden_dtype
        self.model_norm = model_norm
        self.tied_to = (embedding,)
        if owns_embedding:
            self.embedding = embedding
        self.embedding_output = embedding_output
        h, prefix = spec.hidden_size, f"mtp.layers.{depth}"
        names = ("embedding_norm", "hidden_norm", "final_norm")
        norms = [
            builder.norm(norm_weights(f"{prefix}.{name}", h, spec.norm, tp), spec.norm) for name in names
        ]
        self.embedding_norm, self.hidden_norm, self.final_norm = norms
        columns = [Columns(f"{prefix}.projection.weight", h)]
        weight = columns_layout(columns, 2 * h, Init(std=spec.init_std), tp)
        self.projection = builder.column_linear(None, LinearLayout(weight))
        self.layer = layer

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        if self.model_norm is not None:
            hidden = self.model_norm(hidden, info).to(self.hidden_dtype)
        if not info.is_training:
            return hidden
        (embedding,) = self.tied_to
        assert isinstance(embedding, Embedding)
        tokens = self.embedding_output(embedding.words(batch.ahead[self.depth], info), info)
        before = hidden.chunk(self.depth + 1)[-1] if self.depth else hidden
        both = torch.cat((self.embedding_norm(tokens, info), self.hidden_norm(before, info)), dim=-1)
        _, columns = self.projection(both, None, info)
        x = self.layer(gather_columns(columns, self.tp).to(self.hidden_dtype), batch, info)
        return torch.cat((hidden, self.final_norm(x, info).to(self.hidden_dtype)))
