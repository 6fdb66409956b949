"""The tables of rows that `megatrain parity` runs.

    OPTIONS, which words form a row  ──> covering_array.py ──> rows that cover every pair of words

Number formats are words too, but occur in no row of these tables: low_precision.py has rows with them.
Words that do not form a row: more than eight ranks; a batch that does not
divide over the replicas, or needs more than four micro-batches; expert communication without another micro-batch to overlap;
replicated keys and values with more query groups than tensor ranks;
replicas that do not divide into optimizer instances; ranks that experts do not divide; a feature without the feature it needs, or
with one that it excludes; a feature that `resolve` refuses for the model.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, TypeAlias

from megatrain.config import ConfigError
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES, word_of_schedule
from megatrain.tools.parity.covering_array import Pair, Partial, covering_rows, pairs_of, possible_pairs
from megatrain.tools.parity.measure import tiny_plan
from megatrain.tools.parity.models import OF_FAMILIES, OF_FOUR_LAYERS
from megatrain.tools.parity.rows import (
    APART,
    BATCHES,
    FEATURE_OF,
    MAX_RANKS,
    MICRO_BATCH,
    NAMES,
    OPTION_OF,
    OPTIONS,
    USUAL_APART,
    Layout,
    number_of,
)

MAX_PASSES = 4
QUICK_ROWS = 32
ADAPTER_ROWS = (
    "tp2 sp cp2 pp2 recomputenorms lora",
    "dp2 pp2 zero3 overlap tied tokens somelora",
    "tp2 groups1 dp4 zero2 uniform gemma2 lora",
    "tp2 sp cp2 dp2 chunkedmlp lora",
)
"""Rows with adapters."""

ALWAYS = (
    "tp2 sp cp2 pp2 mixtral ep2 auxloss",
    "tp2 sp cp2 pp2 tied deepseek ep2 alltoall seqauxloss dropping mtp1 documents padded120",
    "tp2 sp dp2 pp2 zero1 overlap mixtral ep2 alltoall auxloss tokens",
    "tp2 sp dp2 pp2 zero3 deepseek ep2 etp2 seqauxloss dropspadded",
    "tp2 sp dp2 pp2 zero3 overlap deepseek ep4 etp1 hosts seqauxloss dropping",
    "dp2 pp4 mtpalone mtp2 tied documents tokens",
    "tp2 sp cp2 pp2 bert attentiondropout",
    "pp2 dp2 zero1 tokens tails t5 instances2",
    "dp2 pp2 zero2 dualpipev tied bert",
    "tp2 sp dp2 pp2 mixtral ep2 alltoall t5relative",
    *ADAPTER_ROWS,
    "tp2 sp dp2 pp2 zero3 mixtral ep2 dsa",
)
"""Rows that combine all axes, and those of other families than GPT."""

PACKED_ROWS = (
    "tp2 sp dp2 pp2 zero3 mixtral ep2 seqauxloss packs batch16",
    "dp4 zero1 overlap tied gpt2 packs batch16",
    "tp2 sp dp4 zero2 gemma2 packsgather",
    "dp4 pp2 zero3 uniform mla packsgather",
    "tp2 dp4 zero1 mla recomputelatents packs",
    "dp4 pp2 zero2 hybrid packs",
    "tp2 sp dp2 pp2 zero3 qwen3-next packs",
    "dp4 ep4 alltoall deepseek zero1 overlap packs batch16",
    "dp2 cp2 pp2 ep2 latentexperts seqauxloss zero3 fixedpacks batch16",
    "cp2 dp2 pp2 tied gpt-oss fixedpacks",
    "cp4 dp2 zero0 qwen block firstfit batch16",
)
"""Rows with packs, the first for the quick table too: tp, pp, ep and ZeRO-3 at once."""

PRODUCT: dict[str, tuple[str, ...]] = {
    "tensor parallelism": ("tp1", "tp2", "tp4", "tp8"),
    "key-value replication": tuple(OPTIONS["key-value replication"]),
    "sequence parallelism": ("nosp", "sp"),
    "data parallelism": ("dp1", "dp2", "dp4", "dp8"),
    "sharding over replicas": ("zero0", "zero1", "zero3"),
    "overlap": ("nooverlap", "overlap"),
    "embeddings": ("untied", "tied"),
    "loss": ("means", "tokens"),
    "optimizer": ("adam", "sgd", "muon"),
}
"""Options whose words `--full` combines exhaustively."""

_RING = {"context communication": "ring"}
_REDUCTIONS: tuple[dict[str, str], ...] = (
    {},
    _RING,
    *(
        {**_RING, "pipeline parallelism": "pp1", "context parallelism": cp, "batch": batch}
        for cp, batch in product(OPTIONS["context parallelism"], BATCHES)
    ),
)
"""Changes of the other options, tried in order, when they do not fit a combination's sizes."""

_SIZED: tuple[str, ...] = (
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "context parallelism",
    "key-value replication",
    "optimizer instances",
    "batch",
)
_OF_EXPERTS = (
    "expert parallelism",
    "expert tensor parallelism",
    "experts",
    "balancing",
    "dispatcher",
    "model",
    "sequence parallelism",
    "pipeline schedule",
    "pipeline split",
    "rank order",
)
"""Further options that decide whether experts fit."""
OF_MODELS = (
    "key-value replication",
    "tensor communication",
    "context parallelism",
    "experts",
    "documents",
    "loss",
    "multi-token prediction",
    "distillation",
    "optimizer",
    "optimizer state",
    "attention logits",
)
"""Options of features that `resolve` refuses for some models."""
_WITH: Final = {"copies": "tp2", "tpoverlap": "tp2 sp"}
"""Words that some of them need."""
_OF_MTP = ("multi-token prediction", "pipeline split", "model")
_TIED = {
    name
    for one in FEATURE_OF.values()
    if one.needs or one.excludes
    for name in (one.name, *one.needs, *one.excludes)
}
_BOUND = tuple(
    dict.fromkeys(
        [
            *_SIZED,
            *_OF_EXPERTS,
            *OF_MODELS,
            *_OF_MTP,
            "labels",
            *(OPTION_OF[name] for name in sorted(_TIED)),
        ]
    )
)
"""Options whose words exclude some words of another option."""
_bound_words = operator.itemgetter(*map(NAMES.index, _BOUND))


def is_row(words: Partial, *, max_ranks: int = MAX_RANKS) -> bool:
    """Return whether these words form a row, or can be completed to one (None: open)."""
    return _is_possible(_bound_words(words), max_ranks)


_FEATURES = {feature.name: feature for feature in FEATURE_OF.values()}
_NEEDY = frozenset(name for name, feature in _FEATURES.items() if feature.needs)
_EXCLUDING = frozenset(name for name, feature in _FEATURES.items() if feature.excludes)
_NEEDING_EXPERTS = tuple(
    OPTION_OF[name] for name, feature in _FEATURES.items() if not {"experts", "ep"}.isdisjoint(feature.needs)
)
_PLACES = {name: place for place, name in enumerate(_BOUND)}
_Rule: TypeAlias = "Callable[[Mapping[str, str | None], int], bool]"
_RuleOfWords: TypeAlias = "Callable[[Partial, int], bool]"


def _rule_of(*options: str) -> Callable[[_Rule], _RuleOfWords]:
    """Make a rule that depends on the words of these options alone; its answers are cached by them."""
    own_words = operator.itemgetter(*map(_PLACES.__getitem__, options))

    def with_cache(rule: _Rule) -> _RuleOfWords:
        answer = functools.cache(lambda words, ranks: rule(dict(zip(options, words, strict=True)), ranks))
        return lambda words, max_ranks: answer(own_words(words), max_ranks)

    return with_cache


@functools.cache
def _is_possible(words: Partial, max_ranks: int) -> bool:
    """Return the same for the words of the options in _BOUND."""
    if not all(rule(words, max_ranks) for rule in _RULES):
        return False
    used = {FEATURE_OF[word].name for word in words if word in FEATURE_OF}
    for name in _NEEDY.intersection(used):
        if all(need not in used and words[_PLACES[OPTION_OF[need]]] for need in _FEATURES[name].needs):
            return False
    return all(used.isdisjoint(_FEATURES[name].excludes) for name in _EXCLUDING.intersection(used))


@_rule_of(*_SIZED, "expert communication")
def _sizes_fit(known: Mapping[str, str | None], max_ranks: int) -> bool:
    """Return whether the known sizes fit together."""
    sizes = _sizes_of(known)
    tp, dp, pp, cp = (sizes.get(name, 1) for name in _SIZED[:4])
    if tp * dp * pp * cp > max_ranks:
        return False
    if "batch" in sizes and "data parallelism" in sizes:
        passes, left_over = divmod(sizes["batch"], dp * MICRO_BATCH)
        if left_over or passes > MAX_PASSES:
            return False
    if known["expert communication"] == "moeoverlap" and sizes.get("batch", 16) < 2 * dp * MICRO_BATCH:
        return False  # one micro-batch
    has_replicas = "data parallelism" in sizes and "context parallelism" in sizes
    if has_replicas and dp * cp % max(sizes.get("optimizer instances", 1), 1):
        return False
    groups = sizes.get("key-value replication", 0)
    return not groups or "tensor parallelism" not in sizes or (tp > groups and tp % groups == 0)


@_rule_of("pipeline parallelism", "pipeline schedule", "pipeline split", "expert communication")
def _stages_fit(known: Mapping[str, str | None], _max_ranks: int) -> bool:
    """Return whether the known words split the four layers of a model into virtual stages, whose passes overlap if they are to."""
    ranks = [max(1, number) for number in _numbers_of(known, "pipeline parallelism")]
    schedule, split = known["pipeline schedule"], known["pipeline split"]
    by_word = {word_of_schedule(name): traits.num_chunks or 2 for name, traits in PIPELINE_SCHEDULES.items()}
    chunks = (1, 2) if schedule is None else (by_word[schedule],)
    overlaps = known["expert communication"] == "moeoverlap"
    stages = [a * b for a, b in product(ranks, chunks) if (a > 1 and not overlaps) or (a > 1) == (b > 1)]
    fitting = {"uneven2": (2,), "uneven4": (4,), "mtpalone": (4,)}.get(split or "", (1, 2, 4))
    return not set(stages).isdisjoint(fitting)


def _model_fits(option: str) -> _RuleOfWords:
    """Return the rule that the known model can have the known feature of an option."""

    @_rule_of(option, "model")
    def fits(known: Mapping[str, str | None], _max_ranks: int) -> bool:
        word = known[option]
        return word is None or not is_refused(known["model"], word)

    return fits


def is_refused(model: str | None, word: str) -> bool:
    """Return whether `resolve` refuses the feature of a word with a model (None: open)."""
    return model is not None and _is_refused(model, FEATURE_OF[word].name)


@functools.cache
def _is_refused(model: str, feature: str) -> bool:
    word = next(iter(_FEATURES[feature].words()))
    layout = Layout.of(f"{_WITH.get(feature, '')} {word} {model}")
    if layout == Layout.of(model):
        return False
    try:
        tiny_plan(layout, layout.world_size)
    except ConfigError:
        return True
    return False


@_rule_of("tensor parallelism", "experts", "model")
def _decoder_fits(known: Mapping[str, str | None], _max_ranks: int) -> bool:
    """Return whether the words fit a decoder of 16 tokens and an encoder of two layers, if the model has them."""
    is_allowed = known["tensor parallelism"] != "tp3" and known["experts"] not in OF_FOUR_LAYERS
    return is_allowed or OF_FAMILIES.get(known["model"] or "") != "t5"


@_rule_of(*_OF_MTP)
def _mtp_fits(known: Mapping[str, str | None], _max_ranks: int) -> bool:
    """Return whether the known words fit the layout with a stage for two depths."""
    if known["pipeline split"] != "mtpalone":
        return True
    return known["multi-token prediction"] in (None, "mtp2") and not is_refused(known["model"], "mtp2")


@_rule_of("context parallelism", "context communication")
def _context_fits(known: Mapping[str, str | None], _max_ranks: int) -> bool:
    """Return whether two kinds of context communication have the four ranks that they need."""
    is_mixed = known["context communication"] in ("a2aring", "a2agather")
    return not is_mixed or known["context parallelism"] in (None, "cp4")


@_rule_of(*dict.fromkeys([*_SIZED, *_OF_EXPERTS, *_NEEDING_EXPERTS]))
def _experts_fit(known: Mapping[str, str | None], max_ranks: int) -> bool:
    """Return whether the known words fit experts and their layout (config/subjects/experts.py, ranks.py)."""
    sizes = _sizes_of(known)
    needs = [set(FEATURE_OF[word].needs) for word in known.values() if word in FEATURE_OF]
    has_experts = any(not need.isdisjoint({"experts", "ep", "etp"}) for need in needs)
    if known["experts"] in (None, "dense") and not has_experts:
        return True
    if known["experts"] == "dense" or is_refused(known["model"], "mixtral"):
        return False
    if known["experts"] == "deepseek" and known["balancing"] in ("sinkhorn", "quantiles"):
        return False
    if sizes.get("tensor parallelism", 1) > 1 and known["sequence parallelism"] == "nosp":
        return False
    is_apart = known["rank order"] == "ppfirst"
    return any(
        _ranks_divide(sizes, ep, etp, max_ranks, is_apart=is_apart)
        for ep, etp in _expert_sizes(known)
        if all((ep > 1 and "ep" in need) or (etp > 1 and "etp" in need) for need in needs if "ep" in need)
    )


def _expert_sizes(known: Mapping[str, str | None]) -> Iterator[tuple[int, int]]:
    """Yield the sizes of ep and etp that the known words leave: an all-to-all over hosts has two of two ranks."""
    for ep, etp in product(
        _numbers_of(known, "expert parallelism"), _numbers_of(known, "expert tensor parallelism")
    ):
        if known["dispatcher"] != "hosts" or ep == 4:
            yield ep, etp


def _sizes_of(known: Mapping[str, str | None]) -> dict[str, int]:
    """Return the known sizes."""
    return {name: number_of(word) for name in _SIZED if (word := known[name]) is not None}


def _numbers_of(known: Mapping[str, str | None], option: str) -> list[int]:
    word = known[option]
    return [number_of(each) for each in ([word] if word else OPTIONS[option])]


def _ranks_divide(sizes: Mapping[str, int], ep: int, etp: int, max_ranks: int, *, is_apart: bool) -> bool:
    """Return whether the expert layout divides the ranks, as far as the sizes are known; `is_apart`: order tp-cp-ep-pp-dp."""
    tp, dp, pp, cp = (sizes.get(name, 1) for name in _SIZED[:4])
    if ep * etp * pp > max_ranks:
        return False
    if any(name not in sizes for name in _SIZED[:4]):
        return True
    replicas, rest = divmod(tp * cp * dp, ep * etp)
    if rest or replicas % max(sizes.get("optimizer instances", 1), 1):
        return False
    return not is_apart or pp == 1 or tp * cp == ep * etp


@functools.cache
def pairwise_rows(max_ranks: int = MAX_RANKS, most: int | None = None) -> tuple[Layout, ...]:
    """Return ALWAYS, then rows that cover every possible pair of words, those with the most new pairs first; at most `most`."""
    always = [layout for layout in map(Layout.of, ALWAYS) if is_row(layout.words, max_ranks=max_ranks)]
    rows = covering_rows(_values(), functools.partial(_is_allowed, max_ranks=max_ranks), most)
    layouts = list(dict.fromkeys([*always, *(Layout((*row, *USUAL_APART)) for row in rows)]))[:most]
    return tuple(dict.fromkeys(_with_fewer_passes(layouts, max_ranks)))


def _with_fewer_passes(layouts: Sequence[Layout], max_ranks: int) -> Iterator[Layout]:
    """Reduce the micro-batches per row as far as every covered pair stays covered; rows with pipelines keep theirs."""
    times = Counter(pair for layout in layouts for pair in pairs_of(layout.table_words))
    batches = sorted(BATCHES, key=number_of)
    for layout in layouts:
        numbers = [batch for batch in batches if number_of(batch) < layout.global_batch]
        smaller = [layout.but(f"{batch} moewaits") for batch in numbers]
        own = pairs_of(layout.table_words)
        chosen = layout
        for other in smaller if layout.pp == 1 else ():
            pairs = pairs_of(other.table_words)
            if is_row(other.words, max_ranks=max_ranks) and all(times[pair] > 1 for pair in own - pairs):
                times.subtract(own - pairs)
                times.update(pairs - own)
                chosen = other
                break
        yield chosen


def packed_rows(max_ranks: int = MAX_RANKS) -> tuple[Layout, ...]:
    """Return PACKED_ROWS of at most so many ranks."""
    rows = [Layout.of(f"tokens {text}") for text in PACKED_ROWS]
    return tuple(layout for layout in rows if is_row(layout.words, max_ranks=max_ranks))


@functools.cache
def all_pairs(max_ranks: int = MAX_RANKS) -> frozenset[Pair]:
    """Return the pairs that can occur together in a row."""
    return frozenset(possible_pairs(_values(), functools.partial(_is_allowed, max_ranks=max_ranks)))


@functools.cache
def product_rows(max_ranks: int = MAX_RANKS) -> tuple[Layout, ...]:
    """Return every combination of the options in PRODUCT; the other options rotate, with fewer ranks where they do not fit."""
    fixed = [name for name in NAMES if name in PRODUCT]
    others = covering_rows(
        [("*",) if name in PRODUCT else words for name, words in zip(NAMES, _values(), strict=False)],
        lambda row: _is_allowed(tuple(None if word == "*" else word for word in row), max_ranks),
    )
    others = [(*row, *USUAL_APART) for row in others]
    rows: list[Layout] = []
    uses = Counter(dict.fromkeys(others, 0))
    for words in product(*(PRODUCT[name] for name in fixed)):
        known = dict(zip(fixed, words, strict=True))
        changes = [known | own for own in _REDUCTIONS]
        changes = [one for one in changes if is_row(tuple(map(one.get, NAMES)), max_ranks=max_ranks)]
        candidates = (
            (turn, tuple(map(one.get, NAMES, turn)))
            for turn in sorted(others, key=uses.__getitem__)
            for one in changes
        )
        found = next(((turn, row) for turn, row in candidates if is_row(row, max_ranks=max_ranks)), None)
        if found is not None:
            uses[found[0]] += 1
            rows.append(Layout(found[1]))
    return tuple(rows)


def _values() -> list[tuple[str, ...]]:
    """Return the words of each option that the tables combine: all but those of `APART`, which come last."""
    return [tuple(words) for words in OPTIONS.values()][: -len(APART)]


def _is_allowed(words: Partial, max_ranks: int) -> bool:
    return is_row((*words, *USUAL_APART), max_ranks=max_ranks)


_RULES: Final = (
    _sizes_fit,
    _stages_fit,
    *map(_model_fits, OF_MODELS),
    _decoder_fits,
    _mtp_fits,
    _context_fits,
    _experts_fit,
)
