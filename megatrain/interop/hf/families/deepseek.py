"""DeepSeek V2, V3 and V3.2, and GLM with sparse attention: multi-latent attention, first layers dense, then experts in groups with shared ones.

V3 selects experts by sigmoid scores with a bias per expert, and V3.2 keys by an indexer; their layers of multi-token prediction stay out, as in transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.derive.patterns import parse_expert_pattern
from megatrain.config.schema.tree import Config
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.config_parts import layer_list, num_layers_of
from megatrain.interop.hf.families.llama import (
    BUFFERS,
    EXPERTS,
    GATED,
    MLP,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    NORMS,
    modules,
)
from megatrain.interop.hf.family import (
    COUNT,
    POSITIVE,
    Choice,
    ConfigPart,
    Family,
    Fixed,
    Implied,
    LeftOut,
    Value,
)
from megatrain.interop.hf.rope import LatentRope
from megatrain.storage.untrusted_json import integer

_OF_LATENTS: Final = 1e-6


class _Epsilons:
    """Epsilon of the norms of hidden states; those of latents have 1e-6 in transformers."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        epsilon = float(source.checked("rms_norm_eps", check=POSITIVE))
        of_latents = {} if epsilon == _OF_LATENTS else {"model.latent_norm_epsilon": _OF_LATENTS}
        return {"model.norm_epsilon": epsilon} | of_latents

    def write(self, config: Config) -> dict[str, Any]:
        return {"rms_norm_eps": config.model.norm_epsilon}


@dataclass(frozen=True)
class _Heads:
    """Key and value heads: each query head has its own."""

    default: int | None

    def read(self, source: ConfigFile) -> dict[str, Any]:
        groups = source.get("num_key_value_heads", default=self.default)
        if groups not in (None, source.get("num_attention_heads")):
            raise source.refusal("num_key_value_heads", groups, "latents have keys for every head")
        return {}

    def write(self, config: Config) -> dict[str, Any]:
        return {"num_key_value_heads": config.model.num_attention_heads}


@dataclass(frozen=True)
class _ExpertLayers:
    """Layers with experts: all after the first `first_k_dense_replace`."""

    default: int

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = num_layers_of(source)
        first = source.checked("first_k_dense_replace", check=integer(0, num_layers), default=self.default)
        if first == num_layers:
            raise source.refusal("first_k_dense_replace", first, "a model of this kind has experts")
        return (
            {"experts.moe_layer_freq": layer_list([n >= first for n in range(num_layers)])} if first else {}
        )

    def write(self, config: Config) -> dict[str, Any]:
        has_experts = parse_expert_pattern(config.experts.moe_layer_freq, config.model.num_layers)
        return {"first_k_dense_replace": has_experts.index(True) if True in has_experts else 0}


class _KindsOfLayers:
    """Lists of kinds of layers: an indexer in all, and those with experts; the second list overrides `first_k_dense_replace`."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = num_layers_of(source)
        indexed = ["indexed_attention"] * num_layers
        if source.get("layer_types", default=indexed) != indexed:
            raise source.refusal("layer_types", source.get("layer_types"), "every layer has an indexer")
        kinds = source.get("mlp_layer_types")
        if kinds is None:
            return {}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise source.refusal(
                "mlp_layer_types", kinds, f"a list of dense and sparse for {num_layers} layers"
            )
        return {"experts.moe_layer_freq": layer_list([kind == "sparse" for kind in kinds])}

    def write(self, config: Config) -> dict[str, Any]:
        has_experts = parse_expert_pattern(config.experts.moe_layer_freq, config.model.num_layers)
        return {"mlp_layer_types": ["sparse" if one else "dense" for one in has_experts]}


class _Indexers:
    """An indexer in each layer; GLM may have layers that select the keys of the layer before."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        num_layers = num_layers_of(source)
        source.get("index_skip_topk_offset")
        full = ["full"] * num_layers
        known = {
            "index_topk_freq": (1,),
            "index_topk_pattern": ("F" * num_layers, full),
            "indexer_types": (full,),
        }
        for key, values in known.items():
            value = source.get(key)
            if value is not None and value not in values:
                raise source.refusal(key, value, "layers that share the selection of another layer")
        return {}

    def write(self, config: Config) -> dict[str, Any]:
        return {"indexer_types": ["full"] * config.model.num_layers}


@dataclass(frozen=True)
class _SharedExperts:
    """Shared experts, which form one MLP."""

    default: int

    def read(self, source: ConfigFile) -> dict[str, Any]:
        number = source.checked("n_shared_experts", check=COUNT, default=self.default)
        width = source.checked("moe_intermediate_size", check=COUNT)
        return {"experts.moe_shared_expert_intermediate_size": number * width}

    def write(self, config: Config) -> dict[str, Any]:
        width = config.experts.moe_shared_expert_intermediate_size or 0
        return {"n_shared_experts": width // (config.experts.moe_ffn_hidden_size or 1)}


def scaling_factor(default: float) -> Value:
    """Return the factor of the probabilities of experts, with the default of a family; models of ours may have none."""
    ours = "experts.moe_router_topk_scaling_factor"
    return Value("routed_scaling_factor", ours, POSITIVE, default=default, unset=1.0)


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts; a token uses some. A group's score is the sum of its `best` largest scores."""

    best: int
    groups: int | None
    used: int | None
    methods: tuple[str, ...] = ()
    """Values of `topk_method` without and with groups; empty: there is no choice."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        method = source.get("topk_method", default="greedy") if self.methods else None
        if method is not None and method not in self.methods:
            raise source.refusal("topk_method", method, f"known are {' and '.join(self.methods)}")
        groups = source.checked("n_group", check=COUNT, default=self.groups, is_optional=True)
        used = source.checked("topk_group", check=COUNT, default=self.used, is_optional=True)
        top_k = source.checked("num_experts_per_tok", check=COUNT, default=8)
        if groups in (None, 1) or (self.methods and method == self.methods[0]):
            return {}
        if used is None:
            raise source.refusal("topk_group", used, "groups need the number that a token uses")
        found = {"experts.moe_router_num_groups": groups, "experts.moe_router_group_topk": used}
        return found | (
            {} if top_k // used == self.best else {"experts.moe_router_group_score_topk": self.best}
        )

    def write(self, config: Config) -> dict[str, Any]:
        groups, used = config.experts.moe_router_num_groups, config.experts.moe_router_group_topk
        sizes = {"n_group": groups or (self.groups and 1), "topk_group": used or (self.used and 1)}
        return sizes | ({"topk_method": self.methods[groups is not None]} if self.methods else {})


class NormalizedScores:
    """Sigmoid scores of the experts of a token, divided by their sum; that of a single expert, here, is not."""

    def read(self, source: ConfigFile) -> dict[str, Any]:
        is_normalized = source.get("norm_topk_prob", default=True)
        has_several = source.get("num_experts_per_tok", default=2) != 1
        if is_normalized != has_several:
            raise source.refusal(
                "norm_topk_prob",
                is_normalized,
                "sigmoid scores of several experts are divided by their sum, that of one is not",
            )
        return {}

    def write(self, config: Config) -> dict[str, Any]:
        return {"norm_topk_prob": config.experts.moe_router_topk > 1}


_SIZES: Final = {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
_SIZES_OF_GLM: Final = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}


def _config(
    *,
    first_dense: int,
    shared: int,
    scaling: float,
    experts: int,
    heads: int | None,
    sizes: Mapping[str, int] = _SIZES,
) -> tuple[ConfigPart, ...]:
    """Return the parts that all versions have, with the defaults of one."""
    return (
        *GATED,
        _Epsilons(),
        NO_ATTENTION_BIAS,
        _Heads(heads),
        LatentRope(),
        Value("q_lora_rank", "model.q_lora_rank", default=sizes["q_lora_rank"], is_optional=True),
        Value("kv_lora_rank", "model.kv_lora_rank", default=512),
        Value("qk_nope_head_dim", "model.qk_head_dim", default=sizes["qk_nope_head_dim"]),
        Value("qk_rope_head_dim", "model.qk_pos_emb_head_dim", default=64),
        Value("v_head_dim", "model.v_head_dim", default=sizes["v_head_dim"]),
        Implied(("head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha")),
        Choice("moe_layer_freq", {1: {}}),
        _ExpertLayers(first_dense),
        _SharedExperts(shared),
        Value("moe_intermediate_size", "experts.moe_ffn_hidden_size"),
        Value(
            "n_routed_experts",
            "experts.num_experts",
            default=experts,
            also=("num_experts", "num_local_experts"),
        ),
        scaling_factor(scaling),
        Fixed({"model.multi_latent_attention": True, "model.qk_layernorm": True}),
    )


def _layers_of_prediction(source: ConfigFile, config: Config) -> range:
    number = source.checked("num_nextn_predict_layers", check=integer(0, 64), default=0)
    return range(config.model.num_layers, config.model.num_layers + number)


_LAYER: Final = {
    **NORMS,
    "self_attn.q_proj": "attention.q",
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "self_attn.o_proj": "attention.proj",
    **MLP,
    **EXPERTS,
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
}

_INDEXER: Final = {
    "self_attn.indexer.wq_b": "attention.index_q",
    "self_attn.indexer.wk": "attention.index_k",
    "self_attn.indexer.k_norm": "attention.index_k_norm",
    "self_attn.indexer.weights_proj": "attention.index_weights",
}

DEEPSEEK_V2: Final = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    config=(
        *_config(first_dense=0, shared=2, scaling=1.0, experts=64, heads=None),
        Value("num_experts_per_tok", "experts.moe_router_topk"),
        Choice("scoring_func", {"softmax": {}}),
        Choice("norm_topk_prob", {False: {}}, reason="transformers does not normalize its probabilities"),
        NO_MLP_BIAS,
        ExpertGroups(best=1, groups=None, used=None, methods=("greedy", "group_limited_greedy")),
        Fixed({"experts.moe_router_pre_softmax": True}),
    ),
    modules=modules(_LAYER),
    buffers=BUFFERS,
)
_BIAS: Final = {"mlp.gate.e_score_correction_bias": "mlp.router.expert_bias"}


def _of_v3(
    *, heads: int = 128, groups: int = 8, used: int = 4, sizes: Mapping[str, int] = _SIZES
) -> tuple[ConfigPart, ...]:
    """Return the parts of V3 and its kin, with default numbers of heads and of groups of experts."""
    return (
        *_config(first_dense=3, shared=1, scaling=2.5, experts=256, heads=heads, sizes=sizes),
        Value("num_experts_per_tok", "experts.moe_router_topk", default=8),
        Choice("scoring_func", {"sigmoid": {}}),
        Choice("topk_method", {"noaux_tc": {}}),
        NormalizedScores(),
        Choice("rope_interleave", {True: {}}, reason="adjacent channels form a pair"),
        ExpertGroups(best=2, groups=groups, used=used),
        Fixed(
            {
                "experts.moe_router_score_function": "sigmoid",
                "experts.moe_router_enable_expert_bias": True,
            }
        ),
    )


_MTP: Final = LeftOut("model.layers", "layers of multi-token prediction", _layers_of_prediction)
DEEPSEEK_V3: Final = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    config=_of_v3(),
    modules=modules(_LAYER, _BIAS),
    buffers=BUFFERS,
    more_layers=_MTP,
)


def _with_indexers(*, heads: int, is_interleaved: bool) -> tuple[ConfigPart, ...]:
    """Return the parts of sparse attention, with the default number of an indexer's heads."""
    return (
        _KindsOfLayers(),
        Value("index_n_heads", "model.dsa_indexer_n_heads", default=heads),
        Value("index_head_dim", "model.dsa_indexer_head_dim", default=128),
        Value("index_topk", "model.dsa_indexer_topk", default=2048),
        Choice("indexer_rope_interleave", {is_interleaved: {}}),
        NO_MLP_BIAS,
        Fixed(
            {
                "model.experimental_attention_variant": "dsa",
                "model.dsa_indexer_k_norm_epsilon": 1e-6,
                "model.dsa_indexer_rope_interleaved": is_interleaved,
            }
        ),
    )


DEEPSEEK_V32: Final = Family(
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    config=(*_of_v3(), *_with_indexers(heads=64, is_interleaved=False)),
    modules=modules({**_LAYER, **_INDEXER}, _BIAS),
    buffers=BUFFERS,
    more_layers=_MTP,
)
GLM_MOE_DSA: Final = Family(
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    config=(
        *_of_v3(heads=64, groups=1, used=1, sizes=_SIZES_OF_GLM),
        *_with_indexers(heads=32, is_interleaved=True),
        _Indexers(),
    ),
    modules=modules({**_LAYER, **_INDEXER}, _BIAS),
    buffers=BUFFERS,
    more_layers=_MTP,
)
