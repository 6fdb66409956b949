"""Draw configurations: a layout of one to four ranks, and three to ten options."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Final

from megatrain.tools.parity.models import OF_FAMILIES
from megatrain.tools.parity.rows import FEATURE_OF
from megatrain.tools.parity.runs.options import OPTION_OF, OPTIONS, SENTENCES, SIZES
from megatrain.tools.parity.tables import is_refused

FEWEST, MOST = 3, 10
"""Options of a configuration, without its layout's sizes and its model."""
_LAYOUTS: Final = (
    "tp2", "tp2 sp", "dp2", "pp2", "cp2", "tp3 sp", "dp3", "tp4", "tp4 sp", "dp4", "pp4", "cp4", "tp2 sp dp2", "tp2 dp2",
    "tp2 pp2", "tp2 sp pp2", "tp2 sp cp2", "dp2 pp2", "dp2 cp2", "pp2 cp2", "resumes",
)  # fmt: skip
"""Sizes of the axes; the last one is one process that is stopped and resumed."""
_OF_EXPERTS: Final = ("experts", "router", "balancing", "capacity", "expert parallelism", "dispatcher")
_WORDS_OF: Final = {feature.name: tuple(feature.words()) for feature in FEATURE_OF.values()}
_NOT_DRAWN: Final = ("own", "globalauxloss", "severallosses")
"""Words whose result is not claimed to be the same under every layout (`@unproven` in config/subjects/)."""
_OF_GPT: Final = (
    "distillation",
    "documents",
    "end of document",
    "multi-token prediction",
    "query groups",
    "residual",
    "softmax",
    "window",
)
"""Options that models of sentences refuse."""
_DRAWN: Final = [option for option in OPTIONS if option not in (*SIZES, "model", "sequence parallelism")]


def drawn_words(seed: int, number: int, fixed: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the words of a configuration, which depend on the seed and the number alone.

    Args:
        seed: of all configurations.
        number: of this one.
        fixed: words that it has in any case.
    """
    rng = random.Random(f"{seed} {number}")  # noqa: S311 (no secrets)
    fixed_words = {OPTION_OF[word]: word for word in fixed}
    words = {"model": _choice(rng, "model")}
    is_whole = is_refused(fixed_words.get("model", words["model"]), "cp2")
    layouts = [one for one in _LAYOUTS if not (is_whole and "cp" in one)]
    words |= {OPTION_OF[word]: word for word in rng.choice(layouts).split()}
    if fixed_words.keys() & set(SIZES):
        words = {option: word for option, word in words.items() if option not in (*SIZES, "restart")}
    words |= fixed_words
    if words["model"] in OF_FAMILIES:
        words.setdefault("data", SENTENCES)
    options = rng.sample(_DRAWN, rng.randint(FEWEST, MOST))
    if rng.random() < 0.5:
        options += rng.sample(_OF_EXPERTS, 2)
    is_masked = words["model"] in OF_FAMILIES
    for option in options:
        if option not in words and not (is_masked and option in _OF_GPT):
            words[option] = _choice(rng, option)
    for needed in _needed(rng, words):
        words.setdefault(OPTION_OF[needed], needed)
    if words.get("data parallelism") == "dp3":
        words["batch"] = "batch12"
    return tuple(word for option, word in words.items() if _has_effect(option, word))


def _choice(rng: random.Random, option: str) -> str:
    return rng.choice([word for word in OPTIONS[option] if word not in _NOT_DRAWN])


def _needed(rng: random.Random, words: dict[str, str]) -> Iterator[str]:
    """Yield words without which a drawn one has no effect; words of sizes are not added."""
    for word in [*words.values()]:
        needs = FEATURE_OF[word].needs if word in FEATURE_OF else ()
        own = [need for need in needs if OPTION_OF[_WORDS_OF[need][0]] not in SIZES]
        if own:
            yield rng.choice(_WORDS_OF[own[0]])
    if words.keys() & {"router"}:
        yield rng.choice(_WORDS_OF["experts"])
    if words.get("evaluation") == "fullvalidation" or words.get("data") == "validsets":
        yield rng.choice(("heldout", "indexed", "validsets"))


def _has_effect(option: str, word: str) -> bool:
    """Return False for the default of one of the table's options, which has no flags."""
    is_default = word in FEATURE_OF and word == next(iter(OPTIONS[option]))
    return not is_default or bool(OPTIONS[option][word])
