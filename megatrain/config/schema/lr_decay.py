"""Learning-rate schedules as data: their names, what they ignore, and the settings that they alone read.

`optim/lr_schedule.py` has their formulas. docs/contributing.md lists the places of a new schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.schema.needs import Need, one_of
from megatrain.config.schema.resume_class import SCHEDULE
from megatrain.config.schema.setting import EVALUATION, Section, setting

WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
"""Shapes of the final decay of WSD."""


@dataclass(frozen=True, kw_only=True)
class LrStyle:
    """A schedule of the learning rate after the warm-up."""

    shape: str = ""
    """Its help text."""
    settings: tuple[str, ...] = ()
    """Settings of the schedule that this style alone reads."""
    decays: bool = True
    """False: --min-lr and the end of the decay have no effect."""
    reaches_min_lr: bool = True
    """False: the decay may end above --min-lr, to which the learning rate then falls."""
    final_decay: str | None = None
    """The setting with the samples of a decay at the end, before which the learning rate is constant."""


LR_STYLES: Final[Mapping[str, LrStyle]] = {
    "constant": LrStyle(shape="--lr", decays=False, reaches_min_lr=False),
    "linear": LrStyle(shape="a straight line to --min-lr"),
    "cosine": LrStyle(shape="half a cosine to --min-lr"),
    "inverse-square-root": LrStyle(
        shape="in proportion to 1 / sqrt(samples), not below --min-lr", reaches_min_lr=False
    ),
    "WSD": LrStyle(
        shape="--lr, then a final decay of shape --lr-wsd-decay-style",
        settings=("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        final_decay="lr_wsd_decay_samples",
    ),
}
"""The choices of --lr-decay-style."""

STYLE_SETTINGS: Final = tuple(name for style in LR_STYLES.values() for name in style.settings)
"""Settings that single styles read."""
OF_USER: Final = LrStyle(reaches_min_lr=False)
"""A function of the user's own."""


def read_by(name: str) -> Need:
    """Return the need of a setting that single styles read."""
    return one_of(
        "schedule.lr_decay_style", *(style for style, one in LR_STYLES.items() if name in one.settings)
    )


@dataclass(frozen=True, kw_only=True)
class LrDecay(Section, on_resume=SCHEDULE, taken_by=EVALUATION):
    """The schedule of the learning rate after the warm-up, with the settings that single styles read.

    They are settings of a run, and values that a checkpoint stores.
    """

    lr_decay_style: str = setting(
        "linear", choices={name: style.shape for name, style in LR_STYLES.items()}, accepts_function=True
    )
    """Learning rate between the end of warm-up and the end of the decay; then --min-lr, unless constant."""
    lr_wsd_decay_style: WsdDecayStyle = setting("exponential", needs=read_by("lr_wsd_decay_style"))  # noqa: RUF009 (a field)
    """Shape of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = setting(None, at_least=1, needs=read_by("lr_wsd_decay_samples"))
    """Length of the final decay of WSD, in samples."""

    @property
    def style(self) -> LrStyle:
        return LR_STYLES.get(self.lr_decay_style, OF_USER)

    def reads(self, name: str) -> bool:
        """Return whether the style reads a setting. All styles read those that are not of single styles."""
        return name in self.style.settings or name not in STYLE_SETTINGS
