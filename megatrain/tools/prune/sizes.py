"""The sizes of a pruned model, checked against those of its source before any tensor is read.

targets ─────────> problems: larger than the source, not divisible, absent
--parameters N ──> the widest hidden size with N or fewer parameters, the MLPs in proportion; then the widest MLPs
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.checkpoint.reader import TensorReader
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.patterns import parse_expert_pattern, parse_layer_pattern
from megatrain.config.errors import ConfigError, Problem
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tree import Config, flag_of
from megatrain.config.subjects.model_spec import describe_model
from megatrain.inference.tensor_split import tensor_sizes, without_capacity
from megatrain.interop.hf.settings import shapes_of
from megatrain.interop.hf.tensors import Shape
from megatrain.model.gpt import EMBEDDING_NAME

Sizes = Mapping[str, int]
"""Sizes by the path of their setting."""

LAYERS: Final[str] = "model.num_layers"
HIDDEN: Final[str] = "model.hidden_size"
HEADS: Final[str] = "model.num_attention_heads"
GROUPS: Final[str] = "model.num_query_groups"
FFN: Final[str] = "model.ffn_hidden_size"
EXPERTS: Final[str] = "experts.num_experts"
EXPERT_FFN: Final[str] = "experts.moe_ffn_hidden_size"
SHARED_FFN: Final[str] = "experts.moe_shared_expert_intermediate_size"
WIDTHS: Final = (FFN, EXPERT_FFN, SHARED_FFN)
PATHS: Final = (LAYERS, HIDDEN, HEADS, GROUPS, *WIDTHS, EXPERTS)

_LATER_RANKS: Final = (2, 4, 8)
"""Sizes of parallelism for which the output names what does not divide."""
_MAX_STEP, _MIN_STEPS = 128, 16
OF_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.")
_PATTERNS: Final = {"linear_attention_freq": True, "window_attn_skip_freq": True, "no_rope_freq": False}
"""Patterns of layers, and whether an entry 1 gives a feature or takes it."""
CHANGED: Final = (
    *PATHS,
    *(f"model.{name}" for name in _PATTERNS),
    "model.mtp_num_layers",
    "experts.moe_layer_freq",
)
"""Settings in which a pruned model may differ from its source."""


@dataclass(frozen=True)
class Source:
    """A model as data, from its checkpoint."""

    path: Path
    config: Config
    """The sections of the model and of its experts are the checkpoint's."""
    vocab_size: int

    @classmethod
    def of(cls, reader: TensorReader) -> Source:
        """Return the model of a checkpoint, without multi-token prediction.

        Raises:
            ConfigError: models of its kind are not pruned.
        """
        path, manifest = reader.path, reader.manifest
        model: ModelConfig = stored_section(path, manifest.config, "model", ModelConfig)
        problem = None
        if model.model_family != "gpt":
            problem = f"{path} is a model of --model-family {model.model_family}"
        elif layer_function(model.spec) is not None:
            problem = f"{path} has custom layers of --spec"
        elif model.heterogeneous_layers_config_encoded_json is not None:
            problem = f"{path} has layers with sizes of their own (--heterogeneous-layers-config-path)"
        if problem is not None:
            raise ConfigError(f"{problem}, which is not pruned", fix="name the checkpoint of a GPT in --load")
        config = Config(
            model=model.replaced({"mtp_num_layers": None}),
            experts=stored_section(path, manifest.config, "experts", ExpertsConfig),
        )
        return cls(path, config, manifest.tensors[EMBEDDING_NAME].shape[0])

    @property
    def spec(self) -> ModelSpec:
        """The model; experts have no capacity."""
        return without_capacity(
            describe_model(self.config.model, self.config.experts, vocab_size=self.vocab_size)
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of its tensors, by canonical name."""
        return shapes_of(None, self.config, self.vocab_size)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the model has."""
        spec, config = self.spec, self.config
        layers = spec.layers
        experts = [layer.experts for layer in layers if layer.experts is not None]
        has = {
            HEADS: any(layer.attention is not None for layer in layers),
            FFN: any(layer.dense is not None for layer in layers),
            SHARED_FFN: any(one.shared is not None for one in experts),
        }
        has |= {GROUPS: has[HEADS], EXPERTS: bool(experts), EXPERT_FFN: bool(experts)}
        return {path: config.get(path) for path in PATHS if has.get(path, True)}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def resized(self, sizes: Sizes) -> Source:
        """Return the model with other sizes and as many layers."""
        return Source(self.path, self.config.with_values(sizes), self.vocab_size)

    def with_layers(self, kept: Sequence[int]) -> Source:
        """Return the model with these layers alone: patterns that give layers a feature become lists."""
        model, experts = self.config.model, self.config.experts
        if len(kept) == model.num_layers:
            return self
        values: dict[str, object] = {LAYERS: len(kept)}
        for name, means in _PATTERNS.items():
            text = getattr(model, name)
            if text is not None:
                found = parse_layer_pattern(text, model.num_layers, one_means=means)
                values[f"model.{name}"] = str([int(found[number] == means) for number in kept])
        if experts.num_experts is not None:
            found = parse_expert_pattern(experts.moe_layer_freq, model.num_layers)
            values["experts.moe_layer_freq"] = str([int(found[number]) for number in kept])
        return Source(self.path, self.config.with_values(values), self.vocab_size)


def target_sizes(source: Source, targets: Sizes, parameters: int | None) -> dict[str, int]:
    """Return all sizes of the pruned model.

    Args:
        targets: the sizes that are given.
        parameters: the most parameters; None: no limit.

    Raises:
        ConfigError: the source has no such model; all problems are named.
    """
    problems = list(_problems(source, targets))
    if problems:
        raise ConfigError.of(problems)
    sizes = {**source.sizes, **targets}
    if HEADS in targets and GROUPS not in targets and source.sizes[GROUPS] == source.sizes[HEADS]:
        sizes[GROUPS] = sizes[HEADS]
    if parameters is not None:
        sizes = _within(source, sizes, targets, parameters)
    if sizes == source.sizes:
        raise ConfigError(
            f"no size is smaller than that of {source.path}, which has {source.num_parameters} parameters",
            fix="give --num-layers, --hidden-size, --ffn-hidden-size or --parameters",
        )
    return sizes


def indivisible(spec: ModelSpec) -> Iterator[str]:
    """Yield a sentence for each size that does not divide over the ranks of a later run."""
    experts = next((layer.experts.num_experts for layer in spec.layers if layer.experts is not None), 0)
    found: dict[tuple[str, str], list[str]] = {}
    for ranks in _LATER_RANKS:
        sizes = [("--tensor-model-parallel-size", *one) for one in dict.fromkeys(tensor_sizes(spec, ranks))]
        counts = {"pipeline": (len(spec.layers), "layers"), "expert": (experts, "experts")}
        for axis, (count, unit) in counts.items():
            sizes.append((f"--{axis}-model-parallel-size", f"{count} {unit}", count % ranks == 0))
        for flag, text, divides in sizes:
            if not divides:
                found.setdefault((text, flag), []).append(str(ranks))
    for (text, flag), numbers in found.items():
        yield f"{text} do not divide over {flag} {', '.join(numbers)}"


def _problems(source: Source, targets: Sizes) -> Iterator[Problem]:
    own = source.sizes
    for path, value in targets.items():
        flag = flag_of(path)
        if path not in own:
            yield Problem(f"{flag} {value}: {source.path} has no such part", f"remove {flag}")
        elif not 1 <= value <= own[path]:
            yield Problem(
                f"{flag} {value}: {source.path} has {own[path]}", f"use {flag} with 1 to {own[path]}"
            )
    if all(path in own and 1 <= value <= own[path] for path, value in targets.items()):
        yield from _heads_problems(own, targets)
        yield from _experts_problems(source, own, targets)
    if source.config.model.use_mup and targets.get(HIDDEN, own[HIDDEN]) != own[HIDDEN]:
        yield Problem(
            f"--hidden-size {targets[HIDDEN]}: {source.path} has muP, whose factors follow from the hidden size",
            "remove --hidden-size",
        )


def _heads_problems(own: Sizes, targets: Sizes) -> Iterator[Problem]:
    if HEADS not in own or not targets.keys() & {HEADS, GROUPS}:
        return
    heads, before = targets.get(HEADS, own[HEADS]), own[HEADS] // own[GROUPS]
    groups = targets.get(GROUPS, heads if before == 1 else own[GROUPS])
    if heads % groups or heads // groups > before:
        yield Problem(
            f"{heads} heads in {groups} query groups: a group of the source has {before}, and each keeps equally many",
            f"use --num-attention-heads with a multiple of --num-query-groups, at most {before} times as many",
        )


def _experts_problems(source: Source, own: Sizes, targets: Sizes) -> Iterator[Problem]:
    if EXPERTS not in targets:
        return
    experts, count = source.config.experts, targets[EXPERTS]
    groups, top_k = experts.moe_router_num_groups or 1, experts.moe_router_topk
    in_reach = count * (experts.moe_router_group_topk or groups) // groups
    if count % groups or in_reach < top_k:
        within = f" within {experts.moe_router_group_topk} of {groups} groups" if groups > 1 else ""
        yield Problem(
            f"--num-experts {count}: the router selects {top_k} experts a token{within}",
            f"use --num-experts with a multiple of {groups}, from {-(-top_k * groups // (experts.moe_router_group_topk or groups))}"
            f" to {own[EXPERTS]}",
        )


def _within(source: Source, sizes: dict[str, int], targets: Sizes, parameters: int) -> dict[str, int]:
    """Return sizes with at most `parameters` parameters: hidden size and widths of MLPs that are not given shrink."""
    if _count(source, sizes) <= parameters:
        return sizes
    kept = {*targets, HIDDEN} if source.config.model.use_mup else set(targets)
    widths = _Shrinking.of(sizes, [path for path in WIDTHS if path in sizes and path not in kept])
    both = widths if HIDDEN in kept else _Shrinking.of(sizes, [HIDDEN, *widths.steps])
    found = both.largest(source, sizes, parameters)
    if found is None:
        smallest = _count(source, both.scaled(sizes, 0, 1))
        raise ConfigError(
            f"--parameters {parameters}: the smallest model with these layers and heads has {smallest}",
            fix="give more --parameters, or fewer --num-layers",
        )
    return widths.largest(source, found, parameters) or found


@dataclass(frozen=True)
class _Shrinking:
    """Sizes that shrink in the same proportion, and the steps of each, by path."""

    sizes: Sizes
    steps: Sizes

    @classmethod
    def of(cls, sizes: Sizes, paths: Sequence[str]) -> _Shrinking:
        steps = {path: _step(sizes[path]) for path in paths}
        heads = sizes.get(HEADS, 1)
        if (
            HIDDEN in steps and sizes[HIDDEN] % heads == 0
        ):  # models of transformers need a multiple of the heads
            steps[HIDDEN] = heads * _step(sizes[HIDDEN] // heads)
        return cls(sizes, steps)

    def scaled(self, base: Sizes, part: int, parts: int) -> dict[str, int]:
        """Return `base` with these sizes times part / parts."""
        shrunk = {path: self.sizes[path] * part // parts // step * step for path, step in self.steps.items()}
        return {**base, **{path: max(self.steps[path], size) for path, size in shrunk.items()}}

    def largest(self, source: Source, base: Sizes, parameters: int) -> dict[str, int] | None:
        """Return `base` with the largest such sizes that have at most `parameters` parameters; None: there are none."""
        parts = max((self.sizes[path] // step for path, step in self.steps.items()), default=0)
        part = _last(lambda part: _count(source, self.scaled(base, part, parts)) <= parameters, parts)
        return self.scaled(base, part, parts) if part else None


def _count(source: Source, sizes: Sizes) -> int:
    """Return the most parameters that the model has, for any choice of its layers."""
    of_layers: Counter[str] = Counter()
    rest = 0
    for name, shape in source.resized({**sizes, LAYERS: source.sizes[LAYERS]}).shapes.items():
        found = OF_LAYER.match(name)
        if found is None:
            rest += math.prod(shape)
        else:
            of_layers[found[1]] += math.prod(shape)
    return rest + sum(count for _, count in of_layers.most_common(sizes[LAYERS]))


def _step(size: int) -> int:
    """Return the power of two that a shrinking size is a multiple of: 16 steps or more, none above 128."""
    step = math.gcd(size, _MAX_STEP)
    while step > 1 and size // step < _MIN_STEPS:
        step //= 2
    return step


def _last(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number from 1 to `most` for which a property holds that no larger number regains; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
