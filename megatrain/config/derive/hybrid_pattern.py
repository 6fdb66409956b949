"""Layer patterns of hybrid models (`--hybrid-layer-pattern`): one letter per layer, and each layer but `P` has one part.

    M*M-|M*M-/*E/*E
    ────┬──── ──┬──
        │       └ the layers of a prediction head, once per depth of multi-token prediction
        └ the layers of the decoder; | ends a virtual stage of the pipeline

Source: Megatron-LM, core/models/hybrid/hybrid_layer_allocation.py, which lacks `P`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from megatrain.config.derive.patterns import PatternError

LETTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "M": "Mamba-2",
        "G": "gated delta net",
        "*": "attention",
        "D": "DeepSeek sparse attention",
        "+": "multi-latent attention",
        "-": "MLP",
        "E": "experts",
    }
)
"""The part of a layer by its letter."""
SIDE_BY_SIDE: Final = "P"
"""A layer with Mamba-2 and attention, which both read its norm (Falcon-H1)."""
STAGE, HEAD = "|", "/"
_ATTENTIONS: Final = ("D", "+")
"""Letters that exclude `*`, as in Megatron-LM."""


@dataclass(frozen=True)
class HybridPattern:
    """A parsed pattern."""

    main: str | None
    """Layers of the decoder, with stages; None: a pattern that begins with a head has none."""
    head: str | None
    """Layers of a depth of multi-token prediction."""
    num_depths: int

    @property
    def layers(self) -> str:
        """Letters of the layers of the decoder."""
        return (self.main or "").replace(STAGE, "")

    @property
    def stages(self) -> tuple[str, ...]:
        """Layers of each virtual stage; one, if the pattern names none."""
        return tuple((self.main or "").split(STAGE))

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of layers by letter, those of all depths included."""
        found = Counter(self.layers + (self.head or "") * self.num_depths)
        return {letter: found[letter] for letter in LETTERS}


def parse_hybrid_pattern(text: str) -> HybridPattern:
    """Parse a pattern. Raises PatternError."""
    main, *heads = text.split(HEAD)
    heads = [head for head in heads if head]
    if len(set(heads)) > 1:
        raise PatternError(
            f"'{text}' has the heads {' and '.join(dict.fromkeys(heads))}, and all depths are alike"
        )
    for head in heads[:1]:
        _check_letters(text, head)
    _check_letters(text, main.replace(STAGE, ""))
    used = [letter for letter in _ATTENTIONS if letter in main + "".join(heads)]
    if used and "*" in text:
        raise PatternError(
            f"'{text}' has attention (*) and {LETTERS[used[0]]} ({used[0]}), which exclude each other"
        )
    return HybridPattern(main or (None if HEAD in text else ""), heads[0] if heads else None, len(heads))


def known_pattern(text: str | None) -> HybridPattern | None:
    """Return the parsed pattern; None: there is none, or a rule reports it."""
    try:
        return None if text is None else parse_hybrid_pattern(text)
    except PatternError:
        return None


def has_same_layers(stored: Any, now: Any) -> bool:
    """Stages of a pipeline may change between runs, and heads may be dropped."""
    before, after = known_pattern(stored), known_pattern(now)
    if before is None or after is None:
        return False
    return before.layers == after.layers and (after.head is None or after.head == before.head)


def pattern_of_shares(num_layers: int, attention: float, mlp: float) -> str:
    """Return the pattern that shares of attention and MLP layers stood for (--hybrid-attention-ratio, --hybrid-mlp-ratio).

    Attention layers are spread evenly between runs of Mamba-2; then MLPs replace some of Mamba-2, evenly, after them.

    Raises:
        PatternError: the shares are more than all layers.
    """
    num_attention, num_mlps = round(num_layers * attention), round(num_layers * mlp)
    num_mamba = num_layers - num_attention
    if attention + mlp > 1 or num_mamba < num_mlps:
        raise PatternError(f"shares of {attention:g} attention and {mlp:g} MLP layers exceed 1")
    letters = ["M"] * num_layers
    _spread(letters, "*", num_mamba / (num_attention + 1))
    if num_mlps:
        _spread(letters, "-", (num_mamba - num_mlps) / num_mlps)
    return "".join(letters)


def _spread(letters: list[str], letter: str, run: float) -> None:
    """Replace a Mamba-2 layer by this letter after every `run` of them."""
    left = run
    for place, old in enumerate(letters):
        if old != "M":
            continue
        if left < 0.5:
            letters[place] = letter
            left += run
        else:
            left -= 1


def _check_letters(text: str, letters: str) -> None:
    known = (*LETTERS, SIDE_BY_SIDE)
    unknown = sorted(set(letters) - set(known))
    if unknown:
        raise PatternError(f"'{text}' has {unknown[0]!r}, which is no letter of a layer")
