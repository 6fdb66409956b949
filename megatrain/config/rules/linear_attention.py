"""Rules about linear attention: --experimental-attention-variant."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final

from megatrain.config.derive.patterns import PatternError, parse_layer_pattern
from megatrain.config.errors import Problem
from megatrain.config.fixes import divisors, fewer_ranks, multiples, use
from megatrain.config.plan import Draft
from megatrain.config.rules.sizes import TP
from megatrain.config.schema.tree import flag_of

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


def linear_heads_divide(draft: Draft) -> Problems:
    model, tp = draft.config.model, draft.config.parallel.tensor_model_parallel_size
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
    if keys % tp:
        more = multiples("model.linear_num_key_heads", keys, tp)
        with_values = (
            {**change, **next(multiples("model.linear_num_value_heads", values, *change.values()))}
            for change in multiples("model.linear_num_key_heads", keys, tp)
        )
        yield Problem(
            f"--linear-num-key-heads {keys} is not divisible by --tensor-model-parallel-size {tp}",
            use(draft, fewer_ranks(draft, TP), chain(islice(more, 8), with_values)),
        )


def linear_attention_reads_whole_samples(draft: Draft) -> Problems:
    model, data = draft.config.model, draft.config.data
    words = f"--experimental-attention-variant {model.experimental_attention_variant}"
    if model.experimental_attention_variant is None:
        return
    if (cp := draft.config.parallel.context_parallel_size) > 1:
        yield Problem(
            f"{words} is not supported together with --context-parallel-size {cp}: its state is not passed between context ranks",
            "use --context-parallel-size 1; --sequence-parallel splits the rest of a layer",
        )
    names = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
    given = [flag_of(name) for name in names if getattr(data, name)]
    if given:
        yield Problem(
            f"{words} is not supported together with {' and '.join(given)}: its state does not stop at the end of a document",
            f"remove {' and '.join(given)}",
        )


LINEAR_ATTENTION_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    linear_attention_has_layers,
    linear_heads_divide,
    linear_attention_reads_whole_samples,
)
