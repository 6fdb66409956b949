"""Rules of multi-latent attention (MLA)."""

from collections.abc import Callable, Iterator
from typing import Final

from megatrain.config.derive.model import latent_sizes
from megatrain.config.errors import Problem
from megatrain.config.plan import Draft

Problems = Iterator[Problem]
_FLAG: Final = "--multi-latent-attention"


def latents_exclude_other_heads(draft: Draft) -> Problems:
    """Name the settings of heads that multi-latent attention does not have, or that are missing with it."""
    model, optimizer = draft.config.model, draft.config.optimizer
    if not model.multi_latent_attention:
        return
    path = model.heterogeneous_layers_config_path
    layers = f"--heterogeneous-layers-config-{'encoded-json' if path is None else 'path'}"
    found = {
        "--group-query-attention": (model.group_query_attention, "every head has its own keys"),
        "--rotary-interleaved": (model.rotary_interleaved, "adjacent channels always form a pair"),
        "--no-rope-freq": (model.no_rope_freq is not None, "all layers have RoPE"),
        "--qk-layernorm-width all_heads": (
            model.qk_layernorm and model.qk_layernorm_width == "all_heads",
            "--qk-layernorm normalizes the latents",
        ),
        "--apply-wd-to-qk-layernorm": (
            model.qk_layernorm and optimizer.apply_wd_to_qk_layernorm,
            "norms of latents have no weight decay",
        ),
        "--attention-output-gate": (model.attention_output_gate, "latents have no gate"),
        "--experimental-attention-variant": (
            model.experimental_attention_variant is not None,
            "linear attention replaces attention by heads",
        ),
        "--use-mup": (model.use_mup, "no rule scales the latents"),
        layers: (model.heterogeneous_layers_config_encoded_json is not None, "its layers have no latents"),
    }
    for flag, (is_given, reason) in found.items():
        if is_given:
            also = " and --num-query-groups" if flag == "--group-query-attention" else ""
            yield Problem(f"{flag} is not supported together with {_FLAG}: {reason}", f"remove {flag}{also}")


def latents_have_rope_of_their_own(draft: Draft) -> Problems:
    model = draft.config.model
    if model.multi_latent_attention and model.position_embedding_type == "yarn":
        yield Problem(
            f"--position-embedding-type yarn is not supported together with {_FLAG}, which has RoPE of its own",
            "use --position-embedding-type rope --rope-type yarn",
        )
    if not model.multi_latent_attention or model.rope_type != "yarn":
        return
    if model.yarn_original_max_position_embeddings is None:
        yield Problem(
            "--rope-type yarn requires --yarn-original-max-position-embeddings",
            "give the sequence length of the original training, such as --yarn-original-max-position-embeddings 4096",
        )


def rotary_channels_of_latents_are_even(draft: Draft) -> Problems:
    model = draft.config.model
    if not model.multi_latent_attention:
        return
    percent = model.rotary_percent if model.rope_type == "rope" else 1.0
    channels, given = int(model.qk_pos_emb_head_dim * percent), model.qk_pos_emb_head_dim
    if channels == 0 or channels % 2:
        also = "" if percent == 1 else f" times --rotary-percent {percent} is {channels} channels"
        yield Problem(
            f"--qk-pos-emb-head-dim {given}{also}: RoPE requires an even number of channels above 0",
            f"use --qk-pos-emb-head-dim {given + given % 2}" if percent == 1 else "remove --rotary-percent",
        )


def values_are_not_wider_than_keys(draft: Draft) -> Problems:
    model, sizes = draft.config.model, latent_sizes(draft.config.model)
    if sizes is not None and sizes.v_head_dim > sizes.head_dim:
        yield Problem(
            f"--v-head-dim {model.v_head_dim} is larger than --qk-head-dim {model.qk_head_dim} +"
            f" --qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}, which no attention kernel here supports",
            f"use --v-head-dim {sizes.head_dim} or less",
        )


LATENT_RULES: Final[tuple[Callable[[Draft], Problems], ...]] = (
    latents_exclude_other_heads,
    latents_have_rope_of_their_own,
    rotary_channels_of_latents_are_even,
    values_are_not_wider_than_keys,
)
