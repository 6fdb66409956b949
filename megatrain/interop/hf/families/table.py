"""All families, in the order in which an export tries them, and the models that are refused by name."""

from dataclasses import replace
from typing import Final

from megatrain.config.errors import InputError
from megatrain.interop.hf.config_file import ConfigFile
from megatrain.interop.hf.families.bert import MEGATRON_BERT, MEGATRON_BERT_MASKED
from megatrain.interop.hf.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA
from megatrain.interop.hf.families.gemma import GEMMA2, GEMMA3
from megatrain.interop.hf.families.gpt import GPT2, GPT_NEOX, GPT_OSS, STARCODER2
from megatrain.interop.hf.families.hybrids import BAMBA, FALCON_H1, MAMBA2, NEMOTRON_H, QWEN3_5_BLOCKS
from megatrain.interop.hf.families.llama import LLAMA, MISTRAL, MIXTRAL, OLMO2, OLMOE, PHI3
from megatrain.interop.hf.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_MOE, QWEN3_NEXT
from megatrain.interop.hf.families.shuffled_vision import IDEFICS3, INTERNVL, SMOLVLM
from megatrain.interop.hf.families.t5 import T5
from megatrain.interop.hf.families.vision import CLIP_TOWER, LLAVA, LLAVA_NEXT, SIGLIP_TOWER
from megatrain.interop.hf.family import Family

FAMILIES: Final = {
    family.architecture: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, QWEN3_NEXT, replace(QWEN3_5, variants=(QWEN3_5_BLOCKS,)), QWEN2_MOE, OLMO2, OLMOE, GPT2, GPT_NEOX, STARCODER2, GEMMA2, GEMMA3, PHI3,
        DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA, GPT_OSS, MEGATRON_BERT, MEGATRON_BERT_MASKED, T5, MAMBA2, NEMOTRON_H, BAMBA, FALCON_H1,
        LLAVA, LLAVA_NEXT, IDEFICS3, SMOLVLM, INTERNVL, CLIP_TOWER, SIGLIP_TOWER,
    )
}  # fmt: skip
REFUSED: Final = {
    "Gemma3ForConditionalGeneration": "images",
    "Llama4ForCausalLM": "experts that scale their input",
    "Phi3SmallForCausalLM": "block-sparse attention",
    "FalconForCausalLM": "one norm for both branches of a layer",
    "GPTJForCausalLM": "one norm for both branches of a layer",
    "PhiForCausalLM": "one norm for both branches of a layer",
    "CohereForCausalLM": "one norm for both branches of a layer",
    **dict.fromkeys(
        ("BertForPreTraining", "BertForMaskedLM"),
        "norms of the residual stream after each branch, and a norm of the embedding (MegatronBertForPreTraining has neither)",
    ),
    "ModernBertForMaskedLM": "a norm of the embedding, GEGLU with the exact GELU, and windows in both directions",
    **dict.fromkeys(
        ("MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM"), "the mixer of Mamba-1"
    ),
    "GraniteMoeHybridForCausalLM": "factors of the residual branches and of the logits",
    **dict.fromkeys(("ZambaForCausalLM", "Zamba2ForCausalLM"), "attention that several layers share"),
    **dict.fromkeys(
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
        ),
        "images of any number of patches, rotary positions of rows and columns in the tower, and of three kinds in the text",
    ),
    "UMT5ForConditionalGeneration": "a table of relative positions for each layer",
}
"""Architectures, with what megatrain lacks for them."""


_TOWERS_OF: Final = {"CLIPModel": "CLIPVisionModel", "SiglipModel": "SiglipVisionModel"}
"""Classes of a tower with a text encoder."""


def family_of(config: ConfigFile) -> Family:
    """Return the family of a config.json.

    Raises:
        InputError: there is no table for its architecture.
    """
    name = _TOWERS_OF.get(config.architecture, config.architecture)
    if name in FAMILIES:
        found = next((one for one in FAMILIES[name].kinds if one.is_of(config)), None)
        if found is None:
            kinds = [config.nested(key).get("model_type") for key in ("vision_config", "text_config")]
            raise config.refusal("model_type", kinds, f"a {name} of these parts")
        return found
    where = f"{config.path}: the architecture {name[:80]!r}"
    if name in REFUSED:
        raise InputError(
            f"{where} needs what megatrain lacks: {REFUSED[name]}",
            fix="see docs/weights.md for the families that are converted",
        )
    raise InputError(f"{where} is not converted", fix=f"convert one of {', '.join(sorted(FAMILIES))}")
