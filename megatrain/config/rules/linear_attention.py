"""Rules about linear attention: --experimental-attention-variant."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.patterns import PatternError, parse_layer_pattern
from megatrain.config.errors import Problem
from megatrain.config.fixes import divisors, multiples, use
from megatrain.config.plan import Draft

Problems = Iterator[Problem]


def linear_attention_has_layers(draft: Draft) -> Problems:
    model = draft.config.model
    variant, freq = model.experimental_attention_variant, model.linear_attention_freq
    if variant is not None and freq is None:
        yield Problem(
            f"--experimental-attention-variant {variant} requires --linear-attention-freq",
            "add --linear-attention-freq 4, which leaves attention in every fourth layer",
        )
    try:
        parse_layer_pattern(freq, model.num_layers, one_means=True)
    except PatternError as error:
        yield Problem(
            f"--linear-attention-freq: {error}",
            f"give a number N for all but every Nth layer, or a list such as --linear-attention-freq [1]*{model.num_layers - 1}+[0]",
        )


def linear_heads_share_keys(draft: Draft) -> Problems:
    model = draft.config.model
    if model.experimental_attention_variant is None:
        return
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if values % keys:
        yield Problem(
            f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}",
            use(
                draft,
                multiples("model.linear_num_value_heads", values, keys),
                divisors("model.linear_num_key_heads", values, keys),
            ),
        )


LINEAR_ATTENTION_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    linear_attention_has_layers,
    linear_heads_share_keys,
)
