"""The experts of a layer in place of its MLP: each token goes to some experts, whose outputs are summed by probability.

hidden ─ + ─ norm ──┬─ router ───────────┐
                    ├─ latent projection ┴─ dispatch ─┬─ expert ─┬─ combine ─ latent projection ─ + ─ output ─
                    │                                 ├─ expert ─┤                                │
                    │                                 └─ expert ─┘                                │
                    └─ shared expert, times its gate ─────────────────────────────────────────────┘

    expert e       gate and up [f, h], stacked by rows with those of the rank's other experts; down [h, f] likewise
    over ep        ranks hold different experts; over etp each rank holds a slice of f
    shared expert  over tp, as any MLP
    latents        routed experts may process [t, l] in place of [t, h]: every rank projects its own tokens
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatrain.model.experts.router import Router
from megatrain.model.implementations.module_protocols import GroupedMlp, ResidualNorm
from megatrain.model.layer import BranchOutput, Sequential
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.expert_parallel import TokenDispatcher

FinishExperts = Callable[[], Tensor]
"""Ends combine and returns the output, [s/tp, b, h]."""


class ExpertBranch(nn.Module):
    """The branch of a layer with experts: norm, experts and shared expert, output."""

    def __init__(self, norm: ResidualNorm, mlp: nn.Module, output: BranchOutput) -> None:
        super().__init__()
        self.norm, self.mlp, self.output = norm, mlp, output

    def forward(self, residual: Tensor, delta: Tensor | None, info: PassInfo) -> tuple[Tensor, Tensor | None]:
        residual, x = self.norm.add_and_norm(residual, delta)
        return self.output.add_to(residual, self.mlp(x, info), info)


class Experts(nn.Module):
    """The routed experts. `to_latent` and `from_latent` project their inputs and outputs, or do nothing."""

    def __init__(
        self,
        router: Router,
        dispatcher: TokenDispatcher,
        experts: GroupedMlp,
        to_latent: Sequential,
        from_latent: Sequential,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.to_latent, self.from_latent = to_latent, from_latent

    def forward(self, x: Tensor, info: PassInfo) -> Tensor:  # [s/tp, b, h] -> [s/tp, b, h]
        return self.begin(x, info)()()

    def begin(self, x: Tensor, info: PassInfo) -> Callable[[], FinishExperts]:
        """Begin to dispatch tokens and return a function that computes the experts.

        Work between the calls hides communication and waits of the host: see `TokenDispatcher.overlaps_combine`.
        """
        rows = self.to_latent(x, info).flatten(0, 1)
        finish_dispatch = self.dispatcher.begin_dispatch(rows, lambda: self.router(x, info))

        def compute() -> FinishExperts:
            dispatched = finish_dispatch()._replace(overlapped=(info.compute_late,))
            finish_combine = self.dispatcher.begin_combine(self.experts(dispatched, info), dispatched)

            def finish() -> Tensor:
                out: Tensor = self.from_latent(finish_combine().unflatten(0, x.shape[:2]), info)
                return out

            return finish

        return compute
