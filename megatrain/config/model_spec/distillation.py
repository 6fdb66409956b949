"""Distillation as data: the teacher's model, and how its outputs are matched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.model_spec.model import ModelSpec

PROJECTION_PREFIX: Final = "distillation."
"""Start of the names of projections, which serve the training alone: the model does not read them."""


@dataclass(frozen=True)
class LayerPair:
    """Outputs of two layers whose distance is trained; None: the output of the final norm."""

    student: int | None
    teacher: int | None
    loss: Literal["cosine", "mse"]

    def __str__(self) -> str:
        names = ("final" if number is None else str(number) for number in (self.student, self.teacher))
        return f"{':'.join(names)}:{self.loss}"


@dataclass(frozen=True)
class DistillationSpec:
    """A teacher and the losses against it.

    The trained loss is lm_weight * lm + kd_weight * (logits + layer_weight * mean of the layer pairs). With balance, of a micro-batch:
    lm_weight * lm + c * (logits + (logits / layers) * layers), where c is 1 without the language-model loss, else makes both sums equal.
    """

    teacher: ModelSpec | None
    """None: its outputs are cached."""
    path: str
    """Folder of its checkpoint, hf:FOLDER, or the folder of its outputs."""
    is_reversed: bool
    """KL(student || teacher) in place of KL(teacher || student)."""
    temperature: float
    lm_weight: float
    kd_weight: float
    layer_weight: float
    is_balanced: bool
    pairs: tuple[LayerPair, ...]
    attention: str = ""
    """Attention kernel of the teacher, as `derived.attention_backend`."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline rank."""

    @property
    def needs_balance(self) -> bool:
        """There are losses to balance."""
        return self.is_balanced and bool(self.lm_weight or self.pairs)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the divergence and of the pairs in the log."""
        return ("kd loss", *(f"kd {pair} loss" for pair in self.pairs))

    @property
    def model(self) -> ModelSpec:
        """The teacher of a run that computes it."""
        assert self.teacher is not None, "outputs are not cached"
        return self.teacher

    def forward_flops(self, *, num_tokens: int, sum_of_squared_lengths: int) -> int:
        """Return the FLOPs of the teacher over documents of these lengths."""
        if self.teacher is None:
            return 0
        lengths = {"num_tokens": num_tokens, "sum_of_squared_lengths": sum_of_squared_lengths}
        return self.teacher.training_flops(**lengths) // 3

    def __str__(self) -> str:
        if self.teacher is None:
            return f"forward KL to the outputs in {self.path}, weight {self.kd_weight:g}"
        divergence = "reverse KL" if self.is_reversed else "forward KL"
        return f"{divergence} at temperature {self.temperature:g} to {self.teacher} of {self.path}"
