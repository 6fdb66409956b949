"""The file of --te-precision-config-file: read, malformed, matched with the linear layers of a model."""

import dataclasses
import re
from collections import Counter

import pytest

from megatrain.config import Facts, StoredRun
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec, RouterSpec
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec, MtpSpec
from megatrain.config.model_spec.stack import Stack
from megatrain.config.module_precision import (
    PrecisionFileError,
    Recipe,
    digest_of,
    linear_layers,
    matchers_of,
    recipes_of_modules,
)

CONFIGS = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  fp8: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {fp8_quantization_recipe: tensorwise}}
  fp8_everywhere:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: blockwise, fp8_format: hybrid, override_nonquantized_autocast: true}
  flags:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {override_quantized_autocast: false}
matchers:
"""
MATCHER = "  {}: {{type: glob, enabled: {}, pattern: '{}', config: {}}}\n"
FLAGS = Recipe("delayed", "hybrid")


def file(*matchers):
    """Return the text of a file with these patterns and configs, in order."""
    lines = [MATCHER.format(f"m{n}", "true", pattern, config) for n, (pattern, config) in enumerate(matchers)]
    return CONFIGS + "".join(lines)


def model_of(*layers, mtp=None):
    """Return a model with these layers."""
    sizes = {"hidden_size": 64, "vocab_size": 99, "padded_vocab_size": 128, "is_tied": True}
    return ModelSpec(**sizes, stacks=(Stack(layers=layers),), init_std=0.02, output_init_std=0.01, mtp=mtp)


DENSE = LayerSpec(
    parts=(AttentionSpec(num_heads=4, num_query_groups=4, head_dim=16), MlpSpec(ffn_hidden_size=256))
)
MODEL = model_of(*(DENSE,) * 4)


def chosen(text, layers=range(4)):
    """Return the recipes of the linear layers by path, without `decoder.layers.`."""
    found = recipes_of_modules(text, MODEL, fp8_layers=layers, recipe=FLAGS)
    return {path.removeprefix("decoder.layers."): recipe for path, recipe in found.by_path.items()}


def test_the_first_enabled_matcher_decides():
    text = file(("*.0.*", "bf16"), ("*linear_fc?", "fp8"), ("*", "flags"))
    off = MATCHER.format("disabled", "false", "*", "fp8")
    recipes = chosen(text.replace("matchers:\n", f"matchers:\n{off}"))
    assert {recipes[f"0.{name}"] for name in ("self_attention.linear_qkv", "mlp.linear_fc1")} == {None}
    assert recipes["1.mlp.linear_fc2"] == Recipe("tensorwise", "e4m3")
    assert recipes["3.self_attention.linear_proj"] == FLAGS
    assert Counter(recipes.values()) == {None: 4, Recipe("tensorwise", "e4m3"): 6, FLAGS: 6}


def test_layers_that_the_flags_keep_out_of_fp8_need_an_override():
    """--first-last-layers-bf16 comes before the file, unless a config overrides where the flags have no FP8."""
    recipes = chosen(file(("*fc1", "fp8"), ("*fc2", "fp8_everywhere")), layers=(1, 2))
    assert [recipes[f"{n}.mlp.linear_fc1"] is None for n in range(4)] == [True, False, False, True]
    assert {recipes[f"{n}.mlp.linear_fc2"] for n in range(4)} == {Recipe("blockwise", "hybrid")}
    assert [recipes[f"{n}.self_attention.linear_qkv"] for n in range(4)] == [None, FLAGS, FLAGS, None]


def test_paths_are_those_of_megatron_lm():
    latent = LatentSizes(query_rank=8, kv_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    mlp, router = MlpSpec(ffn_hidden_size=8), RouterSpec(num_experts=4, top_k=2)
    attention = AttentionSpec(num_heads=4, num_query_groups=4, head_dim=8, latent=latent)
    layer = LayerSpec(parts=(attention, ExpertsSpec(router=router, expert=mlp, shared=mlp, latent_size=8)))
    model = model_of(layer, mtp=MtpSpec(num_depths=1, loss_factor=0.1))
    found = {one.path: one.weight for one in linear_layers(model)}
    assert (
        found["decoder.layers.0.self_attention.linear_kv_up_proj"]
        == "decoder.layers.0.attention.kv_up.weight"
    )
    assert (
        found["decoder.layers.0.mlp.shared_experts.linear_fc1"] == "decoder.layers.0.mlp.shared.gate.weight"
    )
    assert found["decoder.layers.0.mlp.fc2_latent_proj"] == "decoder.layers.0.mlp.latent_up.weight"
    assert (
        found["mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc2"] == "mtp.layers.0.mlp.experts.down.weight"
    )
    assert found["mtp.layers.0.eh_proj"] == "mtp.layers.0.projection.weight"
    assert len(found) == 2 * (5 + 6) + 1


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("matchers:", "matcher:", "the file has no matchers"),
        ("type: glob", "type: regex", "matchers.m0.type is 'regex', not glob"),
        ("enabled: true", "enabled: 1", "matchers.m0.enabled is 1, not true or false"),
        ("config: bf16", "config: fp16", "matchers.m0.config 'fp16' is not one of configs: bf16, fp8"),
        ("pattern: '*.0.*'", "pattern: 7", "matchers.m0.pattern 7 is not text"),
        ("type: glob,", "type: glob, regex: a,", "matchers.m0.regex is not known"),
        ("tensorwise", "delayed", "configs.fp8.training_recipe.fp8_quantization_recipe is 'delayed', not one"),
        ("TEQuantizationParams", "Kitchen", "configs.bf16.transformer_engine_config_type is 'Kitchen'"),
        ("training_recipe: {}", "training_recipe: {fp4_quantization_recipe: nvfp4}",
         "configs.bf16.training_recipe.fp4_quantization_recipe is not known"),
        ("training_recipe: {}", "training_recipe: {}, evaluation_recipe: {fp8_format: hybrid}", "evaluation_recipe differs"),
        ("training_recipe: {}", "training_recipe: &a {x: *a}, evaluation_recipe: &b {x: *b}", "values are nested deeper than 64"),
        ("training_recipe: {}", "training_recipe: &a {fp8_format: *a}, evaluation_recipe: &b {fp8_format: *b}",
         "values are nested deeper than 64"),
        ("training_recipe: {}", "training_recipe: {tp_only_amax_red: true}", "configs.bf16.training_recipe.tp_only_amax_red:"),
        ("fp8_format: hybrid", "fp8_format: e5m2", "training_recipe.fp8_format is 'e5m2'"),
        ("bf16:", "fp8:", "line 4: fp8 is given twice"),
        ("m0:", "yes: {}\n  true:", "line 12: the key yes is a YAML bool, not text: quote it"),
        ("m0:", "0x1:", "line 12: the key 0x1 is a YAML int, not text"),
        ("m0:", "[a]:", "line 12: the key is a YAML seq, not text"),
        ("configs:", "- configs:", "expected"),
    ],
)  # fmt: skip
def test_a_malformed_file_has_a_place(old, new, reason):
    text = file(("*.0.*", "bf16"))
    assert old in text
    with pytest.raises(PrecisionFileError, match=re.escape(reason)):
        matchers_of(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 10_000, "configs: 1\nmatchers: {}", "configs: 2024-13-45\nmatchers: {}"]
)
def test_other_contents_are_malformed(text):
    with pytest.raises(PrecisionFileError):
        matchers_of(text)


RUN = "--fp8-format hybrid --te-precision-config-file a.yaml"
FACTS = Facts(module_precision=file(("*fc1", "bf16"), ("*.0.*", "fp8")))


def test_the_plan_says_how_many_linear_layers_have_which_recipe(plan_of):
    plan = plan_of(f"{RUN} --first-last-layers-bf16", facts=FACTS)
    assert str(plan.derived.fp8_modules) == "6 delayed, 10 not FP8"
    assert plan.origins["derived.fp8_modules"].detail == (
        "by a.yaml: matcher m0 decides 2, matcher m1 decides 0, the flags 14"
    )
    assert plan.derived.fp8_layers == (1, 2)
    assert plan_of(RUN, facts=FACTS).derived.fp8_layers == (0, 1, 2, 3)
    assert plan_of("").derived.fp8_modules is None
    assert Facts.from_json(FACTS.to_json()) == FACTS


def test_other_contents_are_a_note_on_resume(plan_of):
    stored = StoredRun(
        path="c", iteration=1, consumed_train_samples=2, config=plan_of(RUN, facts=FACTS).config.to_dict()
    )
    text = file(("*fc2", "bf16"))
    other = dataclasses.replace(FACTS, module_precision=text, checkpoint=stored)
    assert FACTS.module_precision is not None
    change = f"--te-precision-config-digest {digest_of(FACTS.module_precision)} -> {digest_of(text)}"
    assert any(change in note for note in plan_of(f"{RUN} --load c", facts=other).notes)


def test_a_file_that_was_not_read_leaves_the_flags(plan_of):
    """`megatrain port` reads no files."""
    plan = plan_of(RUN)
    assert plan.derived.fp8_modules is None
    assert plan.derived.fp8_layers == (0, 1, 2, 3)
    assert plan.config.precision.te_precision_config_digest is None
