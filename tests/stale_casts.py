"""A planted fault of FP8 with Transformer Engine: the casts of weights of the first step are used to the end."""

import contextlib
from collections.abc import Iterator

from megatrain.model.implementations.transformer_engine_fp8 import TEFp8Linear
from megatrain.parallel.batch import PassInfo


@contextlib.contextmanager
def casting_once(self: TEFp8Linear, info: PassInfo) -> Iterator[dict[str, bool | None]]:
    """Replace `TEFp8Linear.casting`: only the first call in training casts the weight."""
    is_first = not hasattr(self, "was_cast")
    self.was_cast = True  # type: ignore[attr-defined]
    with self.autocast:
        yield {"is_first_microbatch": is_first if info.is_training else None}
