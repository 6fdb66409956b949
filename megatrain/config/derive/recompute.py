"""What is computed twice where nothing was asked for: what is nearly free."""

from typing import Final

from megatrain.config.plan import Answer, Draft

_MOST_PERCENT: Final = 0.5
"""Of a step, that may be given for memory without being asked."""
_BYTES_PER_FLOP: Final = 600 / 4
"""FLOPs that a Hopper GPU's matrix products do while it moves a byte, both as training reaches them (docs/benchmarks.md)."""


def recompute_norms(draft: Draft) -> Answer:
    training, model = draft.config.training, draft.config.model
    if draft.derived.device != "cuda":
        return Answer(False, "not on a GPU")
    if model.transformer_impl != "local":
        return Answer(False, f"--transformer-impl {model.transformer_impl} keeps what its norms give")
    if model.norm_position == "post":
        return Answer(False, "no norm stands before a linear layer")
    if training.recompute_granularity is not None or training.recompute_activations:
        return Answer(False, "something else is computed twice")
    percent = percent_of_norms(model.hidden_size)
    said = f"about {percent:.1f} % of a step at --hidden-size {model.hidden_size}"
    if percent > _MOST_PERCENT:
        return Answer(False, f"that would take {said}")
    return Answer(True, f"it takes {said}, and what two norms a layer give is not kept")


def percent_of_norms(hidden_size: int) -> float:
    """Time of two norms more, of a layer's: 8 h bytes a token, beside 6 FLOPs for each of some 12 h^2 weights."""
    return 100 * 8 * hidden_size * _BYTES_PER_FLOP / (72 * hidden_size**2)
