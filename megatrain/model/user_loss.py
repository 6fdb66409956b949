"""A loss of the user: `--loss file.py:function`.

    def my_loss(inputs: LossInputs) -> Tensor: ...     cross-entropy and data of t tokens ─> their losses [t]

The loss of a token depends on that token alone, so the head applies the function to a chunk of tokens at a time, on each rank
that has them, and every layout computes the same. Its derivative scales the gradient of the cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatrain.config.errors import ConfigError
from megatrain.config.user_function import UserFunction
from megatrain.parallel.batch import Batch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The tokens of a chunk; all are [t]."""

    cross_entropy: Tensor
    """Cross-entropy of each label over the whole vocabulary, in fp32 (fp64 in a model in fp64)."""
    tokens: Tensor
    """Input ids."""
    labels: Tensor
    """Ids to predict; 0 where `loss_mask` is 0."""
    loss_mask: Tensor
    """Weight of each label, applied to the function's result; 0: it does not count."""
    position_ids: Tensor


class UserLoss:
    """The loss that a function computes from the cross-entropy of each token.

    Args:
        function: it is tried on random values.
        digest: of its file in the plan.
        vocab_size: ids of these values are below it.
        device: of the values.

    Raises:
        ConfigError: the function fails, is random, or a token's loss depends on other tokens.
    """

    def __init__(
        self, function: UserFunction, vocab_size: int, device: torch.device, *, digest: str | None = None
    ) -> None:
        self.function, self._call = function, function.load(digest)
        generator = torch.Generator().manual_seed(1)
        tokens, labels = torch.randint(vocab_size, (2, 32), generator=generator).to(device)
        trial = LossInputs(
            cross_entropy=8 * torch.rand(32, dtype=torch.float64, generator=generator).to(device),
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones(32, device=device),
            position_ids=torch.arange(32, device=device),
        )
        whole, again = self._values(trial), self._values(trial)
        first, second = (self._values(_rows(trial, part)) for part in (slice(0, 13), slice(13, 32)))
        parts = [torch.cat(pair) for pair in zip(first, second, strict=True)]
        if not all(map(torch.equal, whole, again)):
            raise self._error("differs when it is called again", "use no random numbers and no state")
        if not all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(whole, parts, strict=True)):
            raise self._error(
                "gives a token another loss among other tokens, which depends on the layout",
                "compute each token's loss from that token's values alone",
            )

    def compute(self, cross_entropy: Tensor, batch: Batch, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the losses of a chunk of the tokens in order [s, b], and their derivatives by the cross-entropy, [t] each."""
        data = (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)
        tokens, labels, mask, positions = (x.t().flatten()[chunk] for x in data)
        inputs = LossInputs(
            cross_entropy=cross_entropy,
            tokens=tokens,
            labels=labels.masked_fill(mask == 0, 0),
            loss_mask=mask,
            position_ids=positions,
        )
        losses, derivatives = self._values(inputs)
        return losses.masked_fill(mask == 0, 0), derivatives.masked_fill(mask == 0, 0)

    def _values(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        x = inputs.cross_entropy.detach().requires_grad_()
        try:
            with torch.enable_grad():
                losses = self._call(LossInputs(**{**vars(inputs), "cross_entropy": x}))
        except Exception as error:
            raise self.function.failure(error) from error
        is_tensor = isinstance(losses, Tensor)
        if not is_tensor or losses.shape != x.shape or not losses.requires_grad:
            what = f"shape {list(losses.shape)}" if is_tensor else type(losses).__name__
            if is_tensor and losses.shape == x.shape:
                what = "losses without a gradient"
            raise self._error(
                f"returned {what}, not losses [{len(x)}] that depend on inputs.cross_entropy",
                "return a tensor with a loss of each token, computed from inputs.cross_entropy",
            )
        (derivatives,) = torch.autograd.grad(losses, x, torch.ones_like(losses))
        return losses.detach().to(x.dtype), derivatives

    def _error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.function.flag} {self.function}: the function {problem}", fix=fix)


def _rows(inputs: LossInputs, part: slice) -> LossInputs:
    return LossInputs(**{field.name: getattr(inputs, field.name)[part] for field in fields(inputs)})
