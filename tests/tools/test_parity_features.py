"""The table of parity features: each choice is in it or excluded, each word changes a setting, and `resolve` refuses what it excludes."""

import pytest

from megatrain.config import ConfigError, parse
from megatrain.config.schema.tree import settings
from megatrain.tools.parity import tables
from megatrain.tools.parity.features import ADAPTERS, NUMBER_FORMATS, OPTIONS, PACKS
from megatrain.tools.parity.measure import tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import FEATURE_OF, Layout
from megatrain.tools.parity.rows import OPTIONS as WORDS_OF
from megatrain.tools.parity.tables import ALWAYS, OF_MODELS, PACKED_ROWS, is_refused, is_row

ALL_OPTIONS = (*OPTIONS, PACKS, ADAPTERS, *NUMBER_FORMATS)
EXCLUDED = {
    "parallel.distributed_backend": "computes the same sums",
    "parallel.use_megatron_fsdp": "turns on a sharding strategy; rows have all of them",
    "training.recompute_activations": "another name of --recompute-granularity selective",
    "training.moe_layer_recompute": "another name of --recompute-modules moe",
    "training.recompute_norms": "another name of --recompute-modules layernorm",
    "training.recompute_mlp_act": "the same on each rank; tests/model/implementations/test_recomputed_activation.py compares the bits",
    "parallel.account_for_embedding_in_pipeline_split": "one of the ways to give stages uneven numbers of layers",
    "parallel.account_for_loss_in_pipeline_split": "one of the ways to give stages uneven numbers of layers",
    "optimizer.apply_wd_to_qk_layernorm": "enabled in one of the models of parity",
    "optimizer.muon_scalar_optimizer": "rows have both optimizers; which parameters are matrices does not depend on the layout",
    "optimizer.muon_scale_mode": "scales whole matrices",
    "optimizer.muon_coefficient_type": "coefficients of whole matrices",
    "parallel.high_priority_stream_groups": "decides when kernels run, on GPUs",
    "parallel.context_parallel_chunk_means": "makes the loss depend on how samples are split, as in Megatron-LM",
    "experts.moe_shared_expert_overlap": "a stream on GPUs; a line of the plan says so",
    "experts.moe_use_upcycling": "decides the initial weights alone; tests/distributed/test_upcycling.py",
    "experts.moe_router_force_load_balancing": "for benchmarks; tests/distributed/model/test_routers_over_ranks.py compares it with one process",
    "precision.bf16": "a precision of parity",
    "precision.fp16": "a precision of parity",
    "precision.params_dtype": "a precision of parity",
    "precision.fp4_recipe": "has one value",
    "precision.qat": "covers dense GPTs alone; tests/distributed/model/test_fake_quantized_layouts.py compares layouts",
    "training.decrease_batch_size_if_needed": "determines the batch size before it is split",
    "training.check_for_nan_in_loss_and_grad": "checks a norm that parity compares",
    "training.check_for_large_grads": "the same",
    "training.check_for_spiky_loss": "checks a loss that parity compares",
    "training.skip_train": "skips training",
    "training.eval_only": "skips training",
    "adapters.lora_target_modules": "covers dense GPTs alone; tests/distributed/model/test_adapters.py compares layouts",
    "training.eval_at_start": "adds an evaluation",
    "training.deterministic_mode": "selects kernels",
    "training.compile": "selects kernels",
    "training.cuda_graph_impl": "launches the same kernels; a line of the plan says so",
    "training.manual_gc": "frees memory",
    "training.manual_gc_eval": "frees memory",
    "training.device": "selects the device",
    "training.require_parity": "decides between a note and an error",
    "training.dry_run": "computes nothing",
    "training.assume_gpu": "plans for another GPU; a run ignores it",
}
"""Choices that no option of parity varies, and the reason."""


@pytest.mark.parametrize("section", ["parallel", "experts", "optimizer", "precision", "training"])
def test_every_choice_is_in_the_table_or_excluded(section):
    choices = {
        setting.path
        for setting in settings()
        if setting.section == section and (setting.choices or setting.kind is bool)
    }
    varied = {path for option in ALL_OPTIONS for path in _settings_of(option)}
    excluded = {path for path in EXCLUDED if path.startswith(f"{section}.")}
    assert choices - varied == excluded, "add a Feature to tools/parity/features.py, or a reason here"


def _settings_of(option):
    """Return the settings that the flags of an option give."""
    flags = " ".join(option.words().values()).split()
    origins = parse(flags).origins
    return sorted(path for path, origin in origins.items() if origin.is_given)


def _usual(option):
    return next(iter(option.words()))


WORDS = [(option, word) for option in ALL_OPTIONS for word in option.words() if word != _usual(option)]


BASES = (
    "",
    *"tp2,tp2 sp,tp8,cp2,cp4,dp2,dp2 zero1,dp3 batch12,dp8 batch16,pp2,pp4,pp4 mtp2,uniform,muon".split(","),
    *"mixtral,mixtral dp2,mixtral dp4,mixtral dp2 ep2,mixtral dp4 ep4,tokens dp4".split(","),
)
"""Layouts that have what a word needs."""


@pytest.mark.parametrize(("option", "word"), WORDS, ids=[word for _, word in WORDS])
def test_a_word_changes_a_setting_of_its_option(option, word):
    layout = next(row for row in (Layout.of(f"{base} {word}") for base in BASES) if is_row(row.words))
    assert _values(option, layout) != _values(option, layout.but(_usual(option)))


def _values(option, layout):
    plan = tiny_plan(layout, layout.world_size, "--bf16", "--params-dtype", "bfloat16")
    return [plan.derived.data_parallel_size, *map(plan.config.get, _settings_of(option))]


REFUSED = {
    ("zero0", "instances"): "dp2 instances2",
    ("chunkedmlp", "tpoverlap"): "tp2 sp tpoverlap chunkedmlp",
    ("zbh1", "moeoverlap"): "pp2 zbh1 dp2 mixtral ep2 moeoverlap",
    ("zbv", "moeoverlap"): "pp2 zbv dp2 mixtral ep2 moeoverlap",
    ("muon", "offload"): "muon offload",
    ("soap", "offload"): "soap offload",
    ("teacher", "zbv"): "pp2 zbv teacher",
    ("teacher", "dualpipev"): "pp2 dualpipev reverseteacher",
    ("mtprepeated", "globalauxloss"): "mixtral globalauxloss mtprepeated",
    ("mtprepeated", "severallosses"): "mixtral severallosses mtprepeated",
}
"""Features that exclude each other, in a layout that has no other fault."""


@pytest.mark.parametrize("words", REFUSED.values())
def test_resolve_refuses_what_a_feature_excludes(words):
    layout = Layout.of(words)
    assert not is_row(layout.words)
    with pytest.raises(ConfigError) as caught:
        tiny_plan(layout, layout.world_size)
    assert len(caught.value.problems) == 1


REFUSED_MODELS = {
    "copies": 6,
    "tpoverlap": 2,
    "cp": 4,
    "experts": 4,
    "documents": 10,
    "tokens": 2,
    "mtp": 10,
    "mtprepeated": 10,
    "teacher": 8,
    "matchedlayers": 8,
    "muon": 2,
    "soap": 3,
    "offload": 2,
    "qkclip": 15,
}
"""Models that `resolve` refuses with each feature: no row has them. A higher number takes rows from the table."""


def test_no_refusal_takes_more_models_from_a_feature():
    found = {
        FEATURE_OF[word].name: sum(is_refused(model, word) for model in MODELS)
        for option in OF_MODELS
        for word in WORDS_OF[option]
    }
    assert {feature: count for feature, count in found.items() if count} == REFUSED_MODELS


def test_every_written_row_is_a_row():
    """Tables leave out rows that are none: fewer ranks have fewer of them, and eight have all."""
    texts = [*ALWAYS, *(f"tokens {text}" for text in PACKED_ROWS)]
    assert [text for text in texts if not is_row(Layout.of(text).words)] == []


def test_a_planted_refusal_is_noticed(monkeypatch):
    """A wrong rule would leave no row that finds it wrong."""

    def refused(layout, *_):
        if layout.has("cp2") and layout.has("gemma2"):
            raise ConfigError("gemma2 is not supported with context ranks", fix="")

    monkeypatch.setattr(tables, "tiny_plan", refused)
    tables._is_refused.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_no_refusal_takes_more_models_from_a_feature()
        assert is_refused("gemma2", "cp2")
        assert not is_refused("llama", "cp2")
    finally:
        tables._is_refused.cache_clear()


def test_every_exclusion_has_a_layout():
    features = [feature for option in OPTIONS for feature in option.features]
    assert {(one.name, other) for one in features for other in one.excludes} == set(REFUSED)
