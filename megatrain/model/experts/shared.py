"""Parts of a layer with experts that process all tokens of a rank: the shared expert, latent projections, the sum with the experts."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.kernels.side_stream import SideStream
from megatrain.model import functions
from megatrain.model.experts.experts import Experts
from megatrain.model.implementations.module_builder import ModuleBuilder
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import (
    Columns,
    LinearLayout,
    columns_bias_layout,
    columns_layout,
    router_layout,
    rows_layout,
    stream_layout,
)
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init, ShardedModule
from megatrain.parallel.tensor_parallel import TensorParallel


class LatentProjection(nn.Module):
    """A linear layer of this rank's tokens, whose weight every tensor rank holds: [s/tp, b, i] -> [s/tp, b, o]."""

    def __init__(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        init: Init,
        builder: ModuleBuilder,
        has_bias: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.linear = builder.replicated_linear(
            None,
            LinearLayout(
                router_layout(f"{name}.weight", num_outputs, num_inputs, init, tp),
                stream_layout(f"{name}.bias", num_outputs, Init(), tp) if has_bias else None,
            ),
        )

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.linear(x, None, info)[1]
        return out


class SharedExpert(ShardedModule):
    """An MLP without norm that computes all tokens; its output may be multiplied by a sigmoid gate of each token."""

    gate: Tensor

    def __init__(self, mlp: MlpSpec, context: LayerContext, prefix: str, *, has_gate: bool) -> None:
        super().__init__()
        gpt, builder, tp, dtype = context.model, context.builder, context.tp, context.ranks.dtype
        h, f, init = gpt.hidden_size, mlp.ffn_hidden_size, Init(std=gpt.init_std)
        columns, biases = (
            [Columns(f"{prefix}.shared.{name}.{kind}", f) for name in mlp.fc1_names]
            for kind in ("weight", "bias")
        )
        fc1_bias = columns_bias_layout(biases, tp) if mlp.has_bias else None
        self.fc1 = builder.column_linear(None, LinearLayout(columns_layout(columns, h, init, tp), fc1_bias))
        down = rows_layout(f"{prefix}.shared.down.weight", h, f, Init(std=gpt.output_init_std), tp)
        fc2_bias = stream_layout(f"{prefix}.shared.down.bias", h, Init(), tp) if mlp.has_bias else None
        self.fc2 = builder.activation_row_linear(mlp, LinearLayout(down, fc2_bias))
        if has_gate:
            self.add_weight("gate", router_layout(f"{prefix}.shared_gate.weight", 1, h, init, tp), dtype)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        out = self.fc2(self.fc1(x, None, info)[1], info)
        if "gate" in self.layouts:
            gate = functions.weight_of(self, "gate")
            out = out * (x @ gate.t()).sigmoid()
        return out


class WithSharedExpert(nn.Module):
    """Experts and a shared expert applied to the same input, their outputs summed; with `side` the shared one runs there on a GPU.

    The shared expert is called where it hides communication or a wait of the host; with `side` it is forked after the begin of
    the dispatch.
    """

    def __init__(self, experts: Experts, shared: nn.Module, side: SideStream | None = None) -> None:
        super().__init__()
        self.experts, self.shared = experts, shared
        self.side = side

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        compute = self.experts.begin(x, info)
        # Deferred weight gradients would read memory of the side stream after it is free there.
        if self.side is not None and x.is_cuda and not info.splits_backward:
            forked = self.side.fork(lambda: self.shared(x, info), x)
            return compute()() + self.side.join(forked)
        if self.experts.dispatcher.overlaps_combine:
            finish = compute()
            shared: Tensor = self.shared(x, info)
        else:
            shared = self.shared(x, info)
            finish = compute()
        return finish() + shared
