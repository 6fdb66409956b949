"""Hybrids: layers of one part each, in the order of a pattern (config/derive/hybrid_pattern.py).

NemotronH   Mamba-2, attention without positions, MLPs and experts with squared ReLU: Nemotron-H, Nemotron Nano 2, Nemotron 3
Mamba2      Mamba-2 alone
Bamba       blocks of a mixer, Mamba-2 or attention with RoPE, and a gated MLP: two layers of ours
FalconH1    blocks of Mamba-2 and attention side by side, and a gated MLP; with factors that our weights hold
Qwen3_5     blocks of a gated delta net or gated attention, and a gated MLP; they are read as layers of a GPT (`qwen.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from megatrain.config.derive.families import mamba_of
from megatrain.config.derive.hybrid_pattern import known_pattern
from megatrain.config.derive.patterns import MAX_LAYERS
from megatrain.config.schema.tree import Config
from megatrain.config.schema.values import Range
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.config_parts import QueryGroups, num_layers_of
from megatrain.interop.hf.families.deepseek import ExpertGroups, NormalizedScores, scaling_factor
from megatrain.interop.hf.families.llama import (
    ATTENTION,
    MLP,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    OUTER,
    SWIGLU,
)
from megatrain.interop.hf.families.qwen import BESIDE_DELTA_NETS, QWEN3_5
from megatrain.interop.hf.family import (
    COUNT,
    POSITIVE,
    PROBABILITY,
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Fused,
    Implied,
    Modules,
    Not,
    Value,
    in_layers,
)
from megatrain.interop.hf.rope import Rope
from megatrain.storage.untrusted_json import flag, integer, list_of, number, text

_EPSILON: Final = 1e-5
"""Epsilon of the gated norm of Mamba-2 here, which is that of all norms in transformers."""
_SMALLEST_STEP: Final = 1e-9
_NOT_NEGATIVE: Final = number(Range(at_least=0))
_FACTOR: Final = number()
_MAMBA2_LENGTH: Final = 1 << 17
"""Length of a Mamba-2 whose config.json has none: its state has no limit."""


def _letters(config: Config) -> str:
    """Return a letter for each layer of a hybrid."""
    pattern = known_pattern(config.model.hybrid_layer_pattern)
    return "" if pattern is None else pattern.layers


def _settings(letters: str) -> dict[str, Any]:
    return {"model.hybrid_layer_pattern": letters, "model.num_layers": len(letters)}


class _Kinds:
    """Kinds of the layers of Nemotron-H: a pattern of letters, as on the hub, or a list."""

    kinds: ClassVar = {
        "linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-", "mamba": "M", "attention": "*",
    }  # fmt: skip
    """The last two are older."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        return _settings(self.letters(source))

    @classmethod
    def letters(cls, source: ConfigFile) -> str:
        """Return a letter for each layer."""
        source.get("num_hidden_layers", "hybrid_override_pattern")
        check = list_of(text(tuple(cls.kinds)), most=MAX_LAYERS)
        kinds = source.checked("layers_block_type", "layer_types", check=check, is_optional=True)
        if kinds is not None:
            return "".join(cls.kinds[kind] for kind in kinds)
        check = text(max_characters=MAX_LAYERS)
        letters: str = source.checked("hybrid_override_pattern", check=check, default="ME*-")
        if not letters or set(letters) - set("ME*-"):
            raise source.refusal(
                "hybrid_override_pattern", letters, "M is Mamba-2, E experts, * attention, - an MLP"
            )
        return letters

    def write(self, config: Config) -> dict[str, Any]:
        letters = _letters(config)
        return {"hybrid_override_pattern": letters, "num_hidden_layers": len(letters)}


@dataclass(frozen=True)
class _Where:
    """Parts of Nemotron-H that matter only with layers of a letter."""

    letter: str
    parts: tuple[ConfigPart, ...]

    def read(self, source: ConfigFile) -> dict[str, Any]:
        found = {path: value for part in self.parts for path, value in part.read(source).items()}
        return found if self.letter in _Kinds.letters(source) else {}

    def write(self, config: Config) -> dict[str, Any]:
        if self.letter not in _letters(config):
            return {}
        return {key: value for part in self.parts for key, value in part.write(config).items()}


@dataclass(frozen=True)
class _Steps:
    """Limits of the step sizes of Mamba-2: models here have none, as in Megatron-LM."""

    raises_small: bool = False
    """Transformers raises steps to `time_step_min` in passes of several tokens, not of one: an export has a tiny one."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        source.get(
            "time_step_max", "time_step_floor", "time_step_rank", "mamba_dt_max", "mamba_dt_init_floor"
        )
        limit = source.get("time_step_limit", "mamba_dt_limit", default=[0.0, float("inf")])
        if limit not in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
            raise source.refusal("time_step_limit", limit, "their step sizes have no limit")
        least = source.checked("time_step_min", "mamba_dt_min", check=_NOT_NEGATIVE, default=0.001)
        if self.raises_small and least > _SMALLEST_STEP:
            source.notes.append(
                f"transformers raises step sizes of Mamba-2 to time_step_min ({least:g}) in passes of several tokens;"
                " models here do not, as in training with Megatron-LM, so that logits differ"
            )
        return {}

    def write(self, config: Config) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        return {"time_step_min": _SMALLEST_STEP} if self.raises_small else {}


class _PredictionHeads(ConfigPart):
    """Multi-token prediction, which transformers leaves out."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        source.get("mtp_layers_block_type", "mtp_hybrid_override_pattern")
        if source.checked("num_nextn_predict_layers", check=integer(0, 64), default=0):
            source.notes.append("the layers of multi-token prediction are left out, as in transformers")
        return {}


@dataclass(frozen=True)
class _Heads:
    """Heads of Mamba-2 and their channels. All channels are a multiple of the hidden size, if `expand` names a key."""

    heads: str
    channels: str
    expand: str | None = None
    default: int | None = 64
    """Channels of a config.json without the key; None: they follow from the multiple."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        heads = source.checked(self.heads, check=COUNT, default=128)
        given = source.get(self.channels, default=self.default)
        total = None
        if self.expand is not None:
            total = source.checked(self.expand, check=COUNT, default=2) * source.checked(
                "hidden_size", check=COUNT
            )
        if self.default is None and given in (None, "auto"):
            given = (total or 0) // heads
        else:
            source.checked(self.channels, check=COUNT, default=self.default)
        if total not in (None, heads * given):
            raise source.refusal(
                self.channels, given, f"with {self.heads} {heads}, {self.expand} * hidden_size gives {total}"
            )
        return {"model.mamba_num_heads": heads, "model.mamba_head_dim": given}

    def write(self, config: Config) -> dict[str, Any]:
        spec, hidden_size = mamba_of(config.model), config.model.hidden_size
        multiple = {} if self.expand is None else {self.expand: max(1, spec.inner_dim // hidden_size)}
        return {self.heads: spec.num_heads, self.channels: spec.head_dim, **multiple}


@dataclass(frozen=True)
class _EqualBlocks:
    """Blocks of the same layers, each with a letter: Mamba-2 alone, or side by side with attention, and an MLP."""

    letters: str

    def read(self, source: ConfigFile) -> dict[str, Any]:
        return _settings(self.letters * num_layers_of(source))

    def write(self, config: Config) -> dict[str, Any]:
        return {"num_hidden_layers": len(_letters(config)) // len(self.letters)}


class _Blocks:
    """Blocks of Bamba: a mixer and an MLP."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_blocks = num_layers_of(source)
        check = list_of(integer(0, num_blocks - 1), most=MAX_LAYERS)
        attention = source.checked("attn_layer_indices", check=check, is_optional=True) or []
        return _settings("".join("*-" if number in attention else "M-" for number in range(num_blocks)))

    def write(self, config: Config) -> dict[str, Any]:
        mixers = _letters(config)[::2]
        attention = [number for number, letter in enumerate(mixers) if letter == "*"]
        return {"num_hidden_layers": len(mixers), "attn_layer_indices": attention}


class _DeltaBlocks:
    """Blocks of Qwen 3.5: a gated delta net or attention, and an MLP."""

    kinds: ClassVar = {"linear_attention": "G-", "full_attention": "*-"}

    def read(self, source: ConfigFile) -> dict[str, Any]:
        check = list_of(text(tuple(self.kinds)), most=MAX_LAYERS)
        return _settings("".join(self.kinds[kind] for kind in source.checked("layer_types", check=check)))

    def write(self, config: Config) -> dict[str, Any]:
        names = {letters[0]: kind for kind, letters in self.kinds.items()}
        types = [names[letter] for letter in _letters(config)[::2]]
        return {"num_hidden_layers": len(types), "layer_types": types}


class _FalconWidths:
    """Channels of all heads of Mamba-2, and the norm of groups, which must follow the gate."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        has_norm = source.checked("mamba_rms_norm", check=flag, default=False)
        is_before = source.checked("mamba_norm_before_gate", check=flag, default=True)
        if has_norm and is_before:
            raise source.refusal("mamba_norm_before_gate", is_before, "the norm of Mamba-2 follows the gate")
        heads = source.checked("mamba_n_heads", check=COUNT, default=128)
        multiple = source.checked("mamba_expand", check=COUNT, default=2)
        total = source.checked("mamba_d_ssm", check=COUNT, default=1024, is_optional=True)
        total = multiple * source.checked("hidden_size", check=COUNT) if total is None else total
        given = source.get("mamba_d_head", default="auto")
        if given not in ("auto", total // heads) or total % heads:
            reason = f"mamba_n_heads {heads} have mamba_d_ssm {total}"
            raise source.refusal("mamba_d_head", given, reason)
        sizes = {"model.mamba_num_heads": heads, "model.mamba_head_dim": total // heads}
        return {**sizes, "model.mamba_without_rmsnorm": not has_norm}

    def write(self, config: Config) -> dict[str, Any]:
        spec = mamba_of(config.model)
        keys = {"mamba_n_heads": spec.num_heads, "mamba_d_head": spec.head_dim, "mamba_d_ssm": spec.inner_dim}
        return {**keys, "mamba_rms_norm": spec.has_norm, "mamba_norm_before_gate": False}


@dataclass(frozen=True)
class _Factors:
    """Factors of Falcon-H1: each has a key, some in a list, and scales the outputs of our modules."""

    keys: tuple[str, ...]
    lists: Mapping[str, int]

    def read(self, source: ConfigFile) -> dict[str, Any]:
        self.values(source)
        return {}

    def write(self, config: Config) -> dict[str, Any]:  # noqa: ARG002 (the signature of a part)
        return dict.fromkeys(self.keys, 1.0) | {key: [1.0] * size for key, size in self.lists.items()}

    def values(self, source: ConfigFile) -> dict[str, list[float]]:
        """Return the factors of each key, one if it has no list."""
        found = {key: [source.checked(key, check=_FACTOR, default=1.0)] for key in self.keys}
        for key, size in self.lists.items():
            found[key] = source.checked(key, check=list_of(_FACTOR, most=size), default=[1.0] * size)
            if len(found[key]) != size:
                raise source.refusal(key, found[key], f"it has {size} numbers")
        return found

    def by_module(self, source: ConfigFile) -> dict[str, float]:
        """Return the factor of the weights of each module."""
        found = self.values(source)
        one = {key: values[0] for key, values in found.items()}
        layer = {
            f"mamba.{name}": one["ssm_in_multiplier"] * factor
            for name, factor in zip(("z", "x", "b", "c", "dt"), found["ssm_multipliers"], strict=True)
        }
        layer |= {f"attention.{name}": one["attention_in_multiplier"] for name in "qkv"}
        layer["attention.k"] *= one["key_multiplier"]
        layer["attention.proj"] = one["attention_out_multiplier"]
        layer["mamba.proj"] = one["ssm_out_multiplier"]
        layer["mlp.gate"], layer["mlp.down"] = found["mlp_multipliers"]
        return {
            "embedding.word_embeddings": one["embedding_multiplier"],
            "output_layer": one["lm_head_multiplier"],
            **{f"decoder.layers.{{}}.{name}": factor for name, factor in layer.items()},
        }


def _mamba(epsilon: str, kernel: str, bias: str, no_bias: str) -> tuple[ConfigPart, ...]:
    """Return what all models here have of Mamba-2, with the keys of one family."""
    return (
        Choice(epsilon, {_EPSILON: {}}, reason=f"the gated norm of Mamba-2 has {_EPSILON:g}"),
        Choice(kernel, {4: {}}, reason="the convolution of Mamba-2 reads 4 tokens", also=("mamba_d_conv",)),
        Choice(bias, {True: {}}, reason="the convolution of Mamba-2 has biases", also=("mamba_conv_bias",)),
        Choice(no_bias, {False: {}}, reason="biases of the projections"),
    )


_MAMBA2: Final = _mamba("layer_norm_epsilon", "conv_kernel", "use_conv_bias", "use_bias")
_BAMBA: Final[tuple[ConfigPart, ...]] = (
    Value("mamba_n_groups", "model.mamba_num_groups", default=1),
    Value("mamba_d_state", "model.mamba_state_dim", default=256),
    _Steps(),
    *_mamba("rms_norm_eps", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias"),
)
_MAMBA_MODULES: Final[Modules] = {
    "in_proj": Fused(tuple(f"mamba.{name}" for name in ("z", "x", "b", "c", "dt"))),
    "conv1d.weight": Fused(tuple(f"mamba.{name}.convolution" for name in "xbc"), is_filter=True),
    "conv1d.bias": Fused(tuple(f"mamba.{name}.convolution_bias" for name in "xbc")),
    "dt_bias": "mamba.dt_bias",
    "A_log": "mamba.a_log",
    "D": "mamba.d",
    "norm": "mamba.gate_norm",
    "out_proj": "mamba.proj",
}


def _outer(embedding: str, norm: str) -> dict[str, str]:
    names = (embedding, norm, "lm_head")
    return dict(zip(names, OUTER.values(), strict=True))


def _mixer(parts: Modules) -> dict[str, str | Fused]:
    return {f"mixer.{theirs}": ours for theirs, ours in parts.items()}


_MAMBA_LAYERS: Final = _mixer(_MAMBA_MODULES)
_LAYERS: Final[Modules] = {
    "norm": Fused(("mamba.norm", "attention.norm", "mlp.norm"), is_one_of=True),
    **_MAMBA_LAYERS,
    **_mixer({theirs.removeprefix("self_attn."): ours for theirs, ours in ATTENTION.items()}),
    **_mixer(
        {
            "up_proj": "mlp.up",
            "down_proj": "mlp.down",
            "gate": "mlp.router",
            "gate.e_score_correction_bias": "mlp.router.expert_bias",
            "experts.{}.up_proj": "mlp.experts.{}.up",
            "experts.{}.down_proj": "mlp.experts.{}.down",
            "shared_experts.up_proj": "mlp.shared.up",
            "shared_experts.down_proj": "mlp.shared.down",
            "fc1_latent_proj": "mlp.latent_down",
            "fc2_latent_proj": "mlp.latent_up",
        }
    ),
}
_HYBRID: Final = {
    "model.model_family": "hybrid",
    "model.normalization": "RMSNorm",
    "model.disable_bias_linear": True,
}
_EXPERTS: Final[tuple[ConfigPart, ...]] = (
    Value("n_routed_experts", "experts.num_experts", default=8, also=("num_local_experts",)),
    Value("num_experts_per_tok", "experts.moe_router_topk", default=2),
    Value("moe_intermediate_size", "experts.moe_ffn_hidden_size", default=7688),
    Value("moe_shared_expert_intermediate_size", "experts.moe_shared_expert_intermediate_size", default=7688),
    Value("moe_latent_size", "experts.moe_latent_size", is_optional=True),
    scaling_factor(1.0),
    NormalizedScores(),
    ExpertGroups(best=2, groups=1, used=1),
    Implied(("n_shared_experts", "moe_shared_expert_overlap")),
    Fixed(
        {
            "experts.moe_router_score_function": "sigmoid",
            "experts.moe_router_enable_expert_bias": True,
        }
    ),
)
_WITHOUT_EFFECT: Final = (
    "num_logits_to_keep use_mamba_kernels rms_norm_eps expand chunk_size mamba_proj_bias mamba_ssm_cache_dtype"
    " residual_in_fp32 rescale_prenorm_residual"
)

NEMOTRON_H: Final = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    config=(
        Fixed({**_HYBRID, "model.position_embedding_type": "none"}),
        Value("hidden_size", "model.hidden_size"),
        Value("max_position_embeddings", "model.max_position_embeddings"),
        _Kinds(),
        Value("num_attention_heads", "model.num_attention_heads"),
        QueryGroups(default=8),
        Value("head_dim", "model.kv_channels", default=128, also=("attention_head_dim",)),
        Value("attention_dropout", "model.attention_dropout", PROBABILITY, default=0.0),
        Value("hidden_dropout", "model.hidden_dropout", PROBABILITY, default=0.0),
        Value("intermediate_size", "model.ffn_hidden_size"),
        Value("layer_norm_epsilon", "model.norm_epsilon", POSITIVE, default=_EPSILON),
        Choice("mlp_hidden_act", {"relu2": {"model.squared_relu": True}, "gelu": {}}),
        NO_MLP_BIAS,
        NO_ATTENTION_BIAS,
        Choice("tie_word_embeddings", {False: {}}, reason="transformers does not tie its output layer"),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=False),
        _Where(
            "M",
            (
                _Heads("mamba_num_heads", "mamba_head_dim"),
                Value("n_groups", "model.mamba_num_groups", default=8, also=("mamba_n_groups",)),
                Value("ssm_state_size", "model.mamba_state_dim", default=128),
                _Steps(raises_small=True),
                *_MAMBA2,
                Choice("mamba_hidden_act", {"silu": {}}),
            ),
        ),
        _Where("E", _EXPERTS),
        _PredictionHeads(),
        Implied(tuple(_WITHOUT_EFFECT.split())),
    ),
    modules={**_outer("backbone.embeddings", "backbone.norm_f"), **in_layers("backbone.layers", _LAYERS)},
    buffers=(r"mtp\..*",),
    renamed={"model.": "backbone."},
)
MAMBA2: Final = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    config=(
        Fixed({**_HYBRID, "model.position_embedding_type": "none", "model.num_attention_heads": 1}),
        Value("hidden_size", "model.hidden_size"),
        Value("max_position_embeddings", "model.max_position_embeddings", default=_MAMBA2_LENGTH),
        _EqualBlocks("M"),
        Value("layer_norm_epsilon", "model.norm_epsilon", POSITIVE, default=_EPSILON),
        Not("tie_word_embeddings", "model.untie_embeddings_and_output_weights", default=False),
        _Heads("num_heads", "head_dim", expand="expand"),
        Value("n_groups", "model.mamba_num_groups", default=8),
        Value("state_size", "model.mamba_state_dim", default=128),
        _Steps(),
        *_MAMBA2,
        Choice("hidden_act", {"silu": {}}),
        Implied(("chunk_size", "residual_in_fp32", "rescale_prenorm_residual")),
    ),
    modules={
        **_outer("backbone.embeddings", "backbone.norm_f"),
        **in_layers("backbone.layers", {"norm": "mamba.norm", **_MAMBA_LAYERS}),
    },
    fits=lambda config: set(_letters(config)) == {"M"},
)
BAMBA: Final = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    config=(
        *SWIGLU,
        Fixed(_HYBRID),
        QueryGroups(default=8),
        Rope(partial="partial_rotary_factor", percent=0.5),
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        _Blocks(),
        _Heads("mamba_n_heads", "mamba_d_head", expand="mamba_expand", default=None),
        *_BAMBA,
        Implied(("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")),
    ),
    modules={
        **_outer("model.embed_tokens", "model.final_layernorm"),
        **in_layers(
            "model.layers",
            {
                "input_layernorm": Fused(("mamba.norm", "attention.norm"), is_one_of=True),
                **{f"mamba.{theirs}": ours for theirs, ours in _MAMBA_MODULES.items()},
                **ATTENTION,
                "pre_ff_layernorm": "mlp.norm",
                **{theirs.replace("mlp.", "feed_forward."): ours for theirs, ours in MLP.items()},
            },
        ),
    },
    fits=lambda config: set(_letters(config)[1::2]) == {"-"} and len(_letters(config)) % 2 == 0,
    layers_per_block=2,
)
QWEN3_5_BLOCKS: Final = replace(
    QWEN3_5,
    config=(*BESIDE_DELTA_NETS, Fixed(_HYBRID), QueryGroups(default=4), _DeltaBlocks()),
    fits=lambda config: set(_letters(config)[::2]) <= {*"G*"} and set(_letters(config)[1::2]) == {"-"},
    layers_per_block=2,
)
_FALCON_FACTORS: Final = _Factors(
    tuple(
        f"{name}_multiplier"
        for name in "embedding lm_head key attention_in attention_out ssm_in ssm_out".split()
    ),
    {"mlp_multipliers": 2, "ssm_multipliers": 5},
)
FALCON_H1: Final = replace(
    BAMBA,
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    config=(
        *SWIGLU,
        Choice("tie_word_embeddings", {False: {}}, reason="the embedding and the output layer have factors"),
        Fixed(_HYBRID),
        QueryGroups(default=8),
        Rope(),
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        Choice("projectors_bias", {False: {}}, reason="biases of the projections"),
        _EqualBlocks("P-"),
        _FalconWidths(),
        *_BAMBA,
        _FALCON_FACTORS,
        Implied(("mamba_chunk_size", "num_logits_to_keep", "mamba_use_mlp")),
    ),
    modules={
        **BAMBA.modules,
        **in_layers("model.layers", {"input_layernorm": "norm"}),
    },
    fits=lambda config: set(_letters(config)[::2]) == {"P"} and set(_letters(config)[1::2]) == {"-"},
    factors=_FALCON_FACTORS.by_module,
)
