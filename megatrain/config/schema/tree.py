"""The whole configuration, and a description of each setting from its dataclass field.

    Config.model.num_layers   <->   Setting(section="model", name="num_layers", flag "--num-layers", kind int, ...)

The command line, YAML, `--help` and the reference page are generated from the settings.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from megatrain.config.schema.adapters import AdaptersConfig
from megatrain.config.schema.data import DataConfig
from megatrain.config.schema.distillation import DistillationConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.logging import LoggingConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.needs import Conflict, Need
from megatrain.config.schema.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatrain.config.schema.parallel import ParallelConfig
from megatrain.config.schema.resume_class import SAFE, ResumeClass
from megatrain.config.schema.setting import Section
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.training import CheckpointConfig, ResilienceConfig, TrainingConfig
from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, Range
from megatrain.config.schema.vision import VisionConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)

    @property
    def withholds_spikes(self) -> bool:
        """A spike updates nothing at first: it is skipped, or computed again."""
        has_check = self.training.check_for_spiky_loss or self.training.check_for_large_grads
        is_validated = self.resilience.rerun_mode == "validate_results" and has_check
        return is_validated or self.resilience.on_spike == ("skip",)

    def get(self, path: str) -> Any:
        """Return the value at a path such as `model.num_layers`. Raises UnresolvedError if it is INVALID."""
        section, name = path.split(".")
        return getattr(getattr(self, section), name)

    def raw(self, path: str) -> Any:
        """Return the value at a path, AUTO, REQUIRED and INVALID included."""
        section, name = path.split(".")
        return CheckedSection.raw(getattr(self, section), name)  # without the checks of the attribute `raw`

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """Return a copy with these values, by path."""
        by_section: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            section, name = path.split(".")
            by_section.setdefault(section, {})[name] = value
        sections = {
            section: getattr(self, section).replaced(changed) for section, changed in by_section.items()
        }
        return dataclasses.replace(self, **sections)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections of JSON values, as a checkpoint stores them."""
        return {
            section.name: {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in vars(getattr(self, section.name)).items()
            }
            for section in dataclasses.fields(self)
        }


OriginKind = Literal["flag", "yaml", "checkpoint", "folder", "default", "derived"]


@dataclass(frozen=True)
class Origin:
    """Origin of a value. `detail`: the flag as typed, `file:line`, the checkpoint's path, the folder's file, or the reason of a derived value."""

    kind: OriginKind
    detail: str = ""

    @property
    def is_given(self) -> bool:
        """The command line or a YAML file has the value."""
        return self.kind in ("flag", "yaml")

    @property
    def is_given_or_stored(self) -> bool:
        return self.is_given or self.kind in ("checkpoint", "folder")

    def __str__(self) -> str:
        return {"flag": self.detail, "yaml": self.detail, "default": "default"}.get(
            self.kind, f"{self.kind}: {self.detail}"
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a section, as the command line and YAML use it."""

    section: str
    name: str
    kind: type[int] | type[float] | type[str] | type[bool]
    """Type of the value; of each value in a list."""
    choices: tuple[str, ...]
    is_list: bool
    is_optional: bool
    default: Any
    range: Range | None = None
    unit: str = ""
    example: str = "it has no default"
    """Value to start from, for a setting without default."""
    alone: str | None = None
    """Value of the flag given alone; None: the flag needs a value."""
    accepts_function: bool = False
    """True if the value may also name a function of the user's own: `my_file.py:my_function`."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Meanings of choices, for the help text."""
    joins_words: bool = False
    """True if the value may be several words on the command line, which are joined by spaces: `0:384 200B:768`."""
    on_resume: ResumeClass = SAFE
    """Effect of a change between a checkpoint and the run that resumes it."""
    may_move: bool = False
    """True: a file; another one in its place is noted, as it may be the same at another path."""
    adapts: Callable[[Any, Any], bool] = lambda _stored, _now: False
    """Test of a stored and a new value, for SHAPE: the weights of one model give those of the other."""
    taken_by: str = ""
    """Flag that takes the value of a checkpoint where none is given. Those of SHAPE and FUNCTION are taken by ARGS too; empty: none."""
    needs: tuple[Need, ...] = ()
    """When the setting has an effect."""
    multiple_of: str = ""
    """Path of another setting that divides it; empty: there is none."""
    conflicts: tuple[Conflict, ...] = ()
    """Settings with which it is not supported."""

    @functools.cached_property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @functools.cached_property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def opposite_flag(self) -> str:
        """Flag that sets a boolean to false."""
        return flag_of(self.name.removeprefix("no_") if self.name.startswith("no_") else f"no_{self.name}")

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def is_derived_if_open(self) -> bool:
        return self.default is AUTO

    @property
    def default_in_words(self) -> str:
        """The default for help and tables."""
        if self.is_required:
            return "required"
        return "auto" if self.is_derived_if_open else in_words(self.default)

    @property
    def accepts_none(self) -> bool:
        """Return whether `none`, or null in YAML, leaves the setting without a value: None, an empty list, or AUTO."""
        has_none = self.is_optional or self.is_derived_if_open or self.default == ()
        return has_none and "none" not in self.choices


REMOVED_SETTINGS: Final[Mapping[str, str]] = {
    "training.product_algorithms": "GEMMs use the algorithms that cuBLAS chooses",
    "training.product_algorithms_digest": "GEMMs use the algorithms that cuBLAS chooses",
}
"""Settings of earlier versions, which saved configurations list, and why they are gone."""


def in_words(value: Any) -> str:
    """Return a value for messages and tables: on, off, none, a number or text, or those of a list."""
    if isinstance(value, tuple | list):
        return " ".join(map(in_words, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def flag_of(name: str) -> str:
    """Return the flag of a field name or path."""
    return "--" + name.rpartition(".")[2].replace("_", "-")


_UNITS: Final = {
    "iters": "iterations",
    "iter": "iterations",
    "interval": "iterations",
    "samples": "samples",
    "minutes": "minutes",
    "mins": "minutes",
}
"""Units by the last word of a name; others are stated."""


def section_types() -> dict[str, type[Section]]:
    """Return name and dataclass of each section, in the order of `Config`."""
    hints = typing.get_type_hints(Config)
    return {section.name: hints[section.name] for section in dataclasses.fields(Config)}


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Return all settings, by section."""
    return tuple(
        setting for name, section in section_types().items() for setting in settings_of(name, section)
    )


@functools.cache
def settings_by_path() -> Mapping[str, Setting]:
    """Return all settings by their paths."""
    return types.MappingProxyType({setting.path: setting for setting in settings()})


def settings_of(name: str, section: type[Section]) -> tuple[Setting, ...]:
    """Return the settings of a section, under this name."""
    hints = typing.get_type_hints(section)
    return tuple(_setting(name, section, entry, hints[entry.name]) for entry in dataclasses.fields(section))


def paths_of(*classes: ResumeClass) -> tuple[str, ...]:
    """Return the paths of the settings of these classes."""
    return tuple(setting.path for setting in settings() if setting.on_resume in classes)


def closest_name(word: str, names: Iterable[str], *, similarity: float = 0.7) -> str | None:
    """Return the name closest to a mistyped `word`. `similarity`: 1 for equal words, 0 for unrelated ones."""
    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=similarity)), None)


def _setting(section: str, cls: type[Section], entry: "dataclasses.Field[Any]", hint: Any) -> Setting:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    (inner,) = (member for member in members if member is not type(None))
    meanings = entry.metadata.get("meanings", {})
    is_list = typing.get_origin(inner) is tuple
    kind = typing.get_args(inner)[0] if is_list else inner
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else tuple(meanings)
    last_word = entry.name.rpartition("_")[2]
    stated: dict[str, Any] = {"unit": _UNITS.get(last_word, ""), **cls.stated(entry.metadata)}
    return Setting(
        section=section,
        name=entry.name,
        kind=str if choices else kind,
        choices=choices,
        is_list=is_list,
        is_optional=len(members) > 1,
        default=entry.default,
        **stated,
    )
