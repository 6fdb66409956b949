"""Parts of a layer with experts that process all tokens of a rank: the shared expert, latent projections, the sum with the experts."""

from __future__ import annotations

from torch import Tensor, nn

from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.linear import Linear
from megatrain.kernels.side_stream import SideStream
from megatrain.model import functions
from megatrain.model.experts.experts import Experts
from megatrain.model.layer_context import LayerContext
from megatrain.model.layouts import router_layout
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.layout import Init, ShardedModule


class LatentProjection(nn.Module):
    """A linear layer of this rank's tokens, whose weight every tensor rank holds: [s/tp, b, i] -> [s/tp, b, o]."""

    def __init__(self, linear: Linear, context: LayerContext, init: Init, *, has_bias: bool) -> None:
        super().__init__()
        self.linear = context.replicated_linear(linear, None, init=init, has_bias=has_bias)

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:
        out: Tensor = self.linear(x, None, info)[1]
        return out


class SharedExpert(ShardedModule):
    """An MLP without norm that computes all tokens; its output may be multiplied by a sigmoid gate of each token."""

    gate: Tensor

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        super().__init__()
        assert spec.shared is not None
        has_bias, model = spec.shared.has_bias, context.model
        fc1, fc2 = spec.linears_of("mlp.shared", model.hidden_size)
        self.fc1 = context.column_linear(fc1, None, has_bias=has_bias, keeps_norm=True)
        weights = context.row_weights(fc2, has_bias=has_bias)
        recompute = context.recompute.has_part("mlp_act")
        self.fc2 = context.builder.activation_row_linear(spec.shared, weights, recompute_activation=recompute)
        if spec.has_shared_gate:
            name, init = f"{context.name(spec)}.shared_gate.weight", Init(std=model.init_std)
            layout = router_layout(name, 1, model.hidden_size, init, context.tp)
            self.add_weight("gate", layout, context.ranks.dtype)

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
