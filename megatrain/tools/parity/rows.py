"""A row of `megatrain parity`: a layout of a tiny model, one word per option, such as `tp2 sp dp2 zero1 tied gpt2`.

    features.py  ─┐
    models.py    ─┼─> OPTIONS: words and their flags ──> Layout ──> measure.py
    batch sizes  ─┘                                         ^── tables.py chooses rows

An option that a row does not name has its first word. To add a word, see features.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from megatrain.tools.parity.features import ADAPTERS, NUMBER_FORMATS, PACKS
from megatrain.tools.parity.features import OPTIONS as FEATURE_OPTIONS
from megatrain.tools.parity.models import MODELS, OF_FAMILIES, flags_of_hybrid

MAX_RANKS = 8
MICRO_BATCH = 2

BATCHES: dict[str, str] = {f"batch{size}": f"--global-batch-size {size}" for size in (8, 2, 12, 16)}

APART: Final = (PACKS, ADAPTERS, *NUMBER_FORMATS)
"""Options that no table combines."""
OPTIONS: dict[str, dict[str, str]] = {
    **{option.name: option.words() for option in FEATURE_OPTIONS},
    "labels": {"labelled": "", "ignored": "", "hollow": "", "tails": ""},
    "loss chunks": {"wholeloss": "", "chunkedloss": ""},
    "padding": {f"padded{size}": f"--make-vocab-size-divisible-by {size}" for size in (1, 120)},
    "model": MODELS,
    "batch": BATCHES,
    **{option.name: option.words() for option in APART},
}
"""Words by option, with the flags of each. `ignored`: some labels are negative (ignored tokens), and labels under a zero mask
are invalid ids. `hollow`: no token counts in the middle half of each sample, so that some context ranks have no token that counts.
`tails`: each sample ends with padding: equal tokens that do not count. `chunkedloss`: the layout computes
the loss in chunks of a few tokens. `padded`: the multiple to which the vocabulary is padded, times tp; 1 spreads the ids over all
ranks, 120 leaves all ranks but the first with padding alone. Samples and documents always start with the same tokens,
which routers score equally up to rounding."""

USUAL_APART = tuple(next(iter(option.words())) for option in APART)
WITHOUT_FORMATS = " ".join(USUAL_APART[2:])
"""Words of the default number formats."""

WORDS: dict[str, int] = {word: place for place, words in enumerate(OPTIONS.values()) for word in words}
NAMES = tuple(OPTIONS)
ALL_FEATURES = (*FEATURE_OPTIONS, *APART)
_IS_LAYOUT = {option.name for option in ALL_FEATURES if option.is_layout} | {"loss chunks"}
FEATURE_OF = {
    word: feature for option in ALL_FEATURES for feature in option.features for word in feature.words()
}
OPTION_OF = {feature.name: option.name for option in ALL_FEATURES for feature in option.features}


@dataclass(frozen=True)
class Layout:
    """One row of the table: one word per option, in the order of the options."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Layout:
        """Parse a layout such as `tp2 sp gpt2`."""
        return cls(tuple(next(iter(words)) for words in OPTIONS.values())).but(text)

    def but(self, text: str) -> Layout:
        """Return the same layout with these words replaced."""
        words = list(self.words)
        for word in text.split():
            words[WORDS[word]] = word
        return Layout(tuple(words))

    def has(self, word: str) -> bool:
        return word in self.words

    @property
    def table_words(self) -> tuple[str, ...]:
        """Words of the options that the tables combine."""
        return self.words[: -len(APART)]

    def words_of(self, *options: str) -> list[str]:
        """Return the words of these options."""
        return [self.words[NAMES.index(option)] for option in options]

    def size(self, option: str) -> int:
        """Return the number at the end of an option's word, such as 2 for `tp2`."""
        return number_of(*self.words_of(option))

    @property
    def tp(self) -> int:
        return self.size("tensor parallelism")

    @property
    def cp(self) -> int:
        return self.size("context parallelism")

    @property
    def dp(self) -> int:
        return self.size("data parallelism")

    @property
    def pp(self) -> int:
        return self.size("pipeline parallelism")

    @property
    def family(self) -> str:
        """Family of the model, a value of --model-family."""
        (word,) = self.words_of("model")
        return OF_FAMILIES.get(word, "gpt")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def has_packs(self) -> bool:
        return not self.has("unpacked")

    @property
    def global_batch(self) -> int:
        return self.size("batch")

    @property
    def name(self) -> str:
        """The words that differ from the first word of their option."""
        plain = Layout.of("").words
        return (
            " ".join(word for word, usual in zip(self.words, plain, strict=True) if word != usual)
            or "one process"
        )

    @property
    def alone(self) -> Layout:
        """The same mathematics in one process: the reference of this layout.

        The global auxiliary loss depends on the number of replicas, so the data-parallel size is kept.
        """
        plain = Layout.of("").words
        is_of_replicas = self.has("globalauxloss") or self.has("severallosses")
        stays = {"data parallelism"} if is_of_replicas else set()
        words = tuple(
            usual if option in _IS_LAYOUT - stays else word
            for option, word, usual in zip(OPTIONS, self.words, plain, strict=True)
        )
        # Routers of unpacked samples see more tokens.
        return Layout(words).but("fixedpacks" if self.has_packs and not self.has("dense") else "")

    def flags(self) -> list[str]:
        """Return the flags of `pretrain.py`; the model's come first, so that an option can override them."""
        texts = [OPTIONS[option][word] for option, word in zip(OPTIONS, self.words, strict=True)]
        (experts, depths) = self.words_of("experts", "multi-token prediction")
        model = flags_of_hybrid(
            texts.pop(NAMES.index("model")),
            has_experts=experts != "dense",
            num_depths={"onetoken": 0, "mtp1": 1}.get(depths, 2),
        )
        return " ".join([model, *texts]).split()


@functools.cache
def number_of(word: str) -> int:
    """Return the number at the end of a word, or 0."""
    return int(word.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
