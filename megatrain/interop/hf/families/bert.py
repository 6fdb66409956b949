"""BERT as Megatron-LM has it: norms before the branches and after the last layer, none after the embedding.

The GELU of the head is exact, and theirs is that of the layers, which so need --no-bias-gelu-fusion. Without a next-sentence head
Megatron-LM has no token types: their table must be 0.
"""

from dataclasses import replace
from typing import Final

from megatrain.interop.hf.families.llama import SIZES
from megatrain.interop.hf.family import (
    POSITIVE,
    PROBABILITY,
    Choice,
    Family,
    Fixed,
    Fused,
    Value,
    in_layers,
)

_LAYER: Final[dict[str, str | Fused]] = {
    "attention.ln": "attention.norm",
    "attention.self.query": "attention.q",
    "attention.self.key": "attention.k",
    "attention.self.value": "attention.v",
    "attention.output.dense": "attention.proj",
    "ln": "mlp.norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
}

_TYPES: Final = "bert.embeddings.token_type_embeddings"

MEGATRON_BERT_MASKED: Final = Family(
    architecture="MegatronBertForMaskedLM",
    model_type="megatron-bert",
    auto_class="AutoModelForMaskedLM",
    config=(
        *SIZES[:-1],
        Value("attention_probs_dropout_prob", "model.attention_dropout", PROBABILITY, default=0.1),
        Value("hidden_dropout_prob", "model.hidden_dropout", PROBABILITY, default=0.1),
        Value("layer_norm_eps", "model.norm_epsilon", POSITIVE, default=1e-12),
        Choice("hidden_act", {"gelu": {}}, reason="the GELU of its head is exact"),
        Choice("type_vocab_size", {2: {}}),
        Choice("tie_word_embeddings", {True: {}}, reason="an output layer with a bias of its own"),
        Choice("position_embedding_type", {"absolute": {}}),
        Choice("is_decoder", {False: {}}),
        Choice("add_cross_attention", {False: {}}),
        Fixed(
            {
                "model.model_family": "bert",
                "model.bert_no_binary_head": True,
                "model.no_bias_gelu_fusion": True,
                "model.normalization": "LayerNorm",
                "model.position_embedding_type": "learned_absolute",
            }
        ),
    ),
    modules={
        "bert.embeddings.word_embeddings": "embedding.word_embeddings",
        "bert.embeddings.position_embeddings": "embedding.position_embeddings",
        **in_layers("bert.encoder.layer", _LAYER, "encoder"),
        "bert.encoder.ln": "encoder.final_norm",
        "cls.predictions.transform.dense": "lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_head.norm",
        "cls.predictions.decoder": "output_layer",
        "cls.predictions.bias": "output_layer.bias",
    },
    buffers=(r"bert\.embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    zeros={f"{_TYPES}.weight": 2},
)
MEGATRON_BERT: Final = replace(
    MEGATRON_BERT_MASKED,
    architecture="MegatronBertForPreTraining",
    auto_class="AutoModelForPreTraining",
    config=(*MEGATRON_BERT_MASKED.config, Fixed({"model.bert_no_binary_head": False})),
    modules={
        **MEGATRON_BERT_MASKED.modules,
        _TYPES: "embedding.tokentype_embeddings",
        "bert.pooler.dense": "pooler.dense",
        "cls.seq_relationship": "binary_head",
    },
    zeros={},
)
