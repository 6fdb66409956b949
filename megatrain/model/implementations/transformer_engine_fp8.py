"""FP8 in linear layers of Transformer Engine: the library casts and multiplies.

    tensorwise, blockwise, mxfp8    the library computes scales from the tensor that it casts
    delayed                         `AmaxHistory` reads the largest values that the library's casts record, and writes the
                                    scales of the next step, as it does for `local`

The library's own history stays off: it would change scales with every call of a module, and store them as a pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatrain.parallel.batch import PassInfo
from megatrain.parallel.fp8.amax_history import LibraryTensor
from megatrain.parallel.fp8.scaling import Fp8Recipe

SLOTS: Final = (("scaling_fwd", 0), ("scaling_fwd", 1), ("scaling_bwd", 0))
"""Places of input, weight and output gradient in `fp8_meta` of a linear layer."""
_RECIPES: Final = {
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
"""Class names in `transformer_engine.common.recipe`."""


class TEFp8Linear:
    """FP8 of one linear layer of the library.

    Args:
        module: the linear layer.
        te: `transformer_engine.pytorch`.
        name: canonical name of its weight.
    """

    def __init__(self, module: Any, te: Any, recipe: Fp8Recipe, name: str) -> None:
        self.keeps_weight = recipe.keeps_weights
        # `_graph`: the caller reduces the largest values and updates the scales, as for CUDA graphs.
        self.autocast = te.autocast(enabled=True, recipe=_library_recipe(recipe), _graph=True)
        self.seen: Any = None
        """Largest values of the forward pass; None: the recipe has no history."""
        if recipe.history is None:
            return
        with self.autocast:
            module.init_fp8_metadata()
        self.seen = module.fp8_meta["scaling_fwd"].amax_history
        for (direction, slot), (tensor, dtype) in zip(SLOTS, recipe.tensors(name), strict=True):
            meta = module.fp8_meta[direction]
            recipe.history.add(tensor, dtype, LibraryTensor(meta.amax_history[0][slot], meta.scale[slot]))

    @contextmanager
    def casting(self, info: PassInfo) -> Iterator[dict[str, bool | None]]:
        """Make calls of the layer in this context run in FP8; yields their options.

        The first micro-batch of a step casts the weight, and the others use the cast. Evaluation keeps no casts and adds
        nothing to the history.
        """
        is_kept = self.keeps_weight and info.is_training
        with self.autocast:
            yield {"is_first_microbatch": info.microbatch == 0 if is_kept else None}
        if self.seen is not None and not info.is_training:
            self.seen.zero_()


def _library_recipe(recipe: Fp8Recipe) -> Any:
    """Return the recipe as an object of the library."""
    from transformer_engine.common import recipe as recipes  # noqa: PLC0415 (optional)

    fp8_format = {"hybrid": recipes.Format.HYBRID, "e4m3": recipes.Format.E4M3}[recipe.format]
    if recipe.name == "delayed":
        return recipes.DelayedScaling(fp8_format=fp8_format, amax_history_len=1)
    return getattr(recipes, _RECIPES[recipe.name])(fp8_format=fp8_format)
