"""No fix of a model or layout with one more setting leads round in a circle: its own fix must not lead back.

model, layout or option  x  each value of each setting ──> problems ──> their first fixes, up to five times ──> a run, or a user's turn
"""

from collections.abc import Iterator

import pytest
from everyday import only
from test_fixes_resolve import end_of, problems_of

from megatrain.config import Facts
from megatrain.config.schema.tree import Setting, settings
from megatrain.tools.parity.models import MODELS

MOST_ROUNDS = 5
RANKS = Facts(world_size=4)
_LATENTS = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 --q-lora-rank 20"
    " --rope-type rope"
)
_PACKS = "--pack-documents --micro-batch-size 1 --calculate-per-token-loss"
_HYBRID = "--model-family hybrid --mamba-num-heads 8 --mamba-head-dim 16 --hybrid-layer-pattern"
_HEADS = (
    "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
_STAGES = "--pipeline-model-parallel-size 2"
RUNS = {
    "plain": "",
    "packs": _PACKS,
    "packs on groups of any size": f"--context-parallel-size 2 --dynamic-context-parallel {_PACKS}",
    "latents": _LATENTS,
    "sparse attention": (
        f"{_LATENTS} --experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5"
    ),
    "linear attention": f"--experimental-attention-variant gated_delta_net --linear-attention-freq 2 {_HEADS}",
    "experts": "--num-experts 4",
    "depths": "--mtp-num-layers 1",
    "hybrid": f"{_HYBRID} M*-M",
    "hybrid with depths": f"{_HYBRID} M*-M/*-",
    "hybrid in stages": f"{_HYBRID} M*|-M {_STAGES}",
    "hybrid with experts": f"{_HYBRID} ME*E --num-experts 4",
    "hybrid with latents": f"{_HYBRID} M+-M {_LATENTS}",
    "hybrid with deltas": f"{_HYBRID} MG*- {_HEADS}",
    **{family: MODELS[family] for family in ("bert", "t5", "vlm")},
    "layers of any size": (
        '--heterogeneous-layers-config-encoded-json {"block_configs":['
        + ",".join(['{"attention":{"n_heads_in_group":2},"ffn":{"ffn_hidden_size":64}}'] * 3)
        + ',{"attention":{"no_op":true},"ffn":{"ffn_hidden_size":64}}]}'
    ),
    "muon": "--optimizer muon",
    "soap": "--optimizer soap",
    "adapters": "--lora-rank 4",
    "fp8": "--bf16 --fp8-format hybrid",
    "rounded weights": "--qat int8",
    "transformer engine": "--bf16 --transformer-impl transformer_engine",
    "mup": "--use-mup --mup-base-hidden-size 32",
    "stages": _STAGES,
    "zb-v": f"{_STAGES} --pipeline-schedule zb-v",
    "dualpipe-v": f"{_STAGES} --pipeline-schedule dualpipe-v",
    "tensor ranks": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context ranks": "--context-parallel-size 2",
    "zero3": "--data-parallel-sharding-strategy optim_grads_params",
    "cyclic": "--dataloader-type cyclic",
    "pieces": "--seq-length-schedule 0:64",
    "graphs": "--cuda-graph-impl local",
    "offloading": "--fine-grained-activation-offloading --offload-modules attn_norm",
    "only evaluates": "--skip-train",
}
OTHERS = {
    "model.window_size": ("5,0",), "model.no_rope_freq": ("2",), "data.seq_length_schedule": ("0:64",),
    "training.rampup_batch_size": ("16 16 64",), "training.step_batch_size_schedule": ("0:16",),
    "model.hybrid_layer_pattern": ("*-*-", "*-*-/*-"), "experts.moe_layer_freq": ("2",), "experts.moe_aux_loss_coeff": ("0.1",),
    **dict.fromkeys(
        (
            "model.spec", "model.heterogeneous_layers_config_path", "training.loss", "data.dataset",
            "distillation.export_kd_teacher_load",
        ),
        (),
    ),
}  # fmt: skip
"""Values of settings that need a text of their own, and none for files that would be read."""


def flags_of(setting: Setting) -> Iterator[str]:
    if setting.kind is bool:
        yield from (flag for flag in (setting.flag, setting.opposite_flag))
        return
    values = OTHERS.get(setting.path)
    if values is None and setting.choices:
        values = setting.choices
    if values is None:
        values = {int: ("1", "2", "3", "8"), float: ("0.5",), str: ("x",)}[setting.kind]
    yield from (f"{setting.flag} {value}" for value in values)


@pytest.mark.parametrize("run", only({"packs", "hybrid with depths"}, RUNS))
def test_no_fix_leads_round_in_a_circle(arguments_of, run):
    endless = []
    for setting in settings():
        if setting.section in ("logging", "checkpoint", "tokenizer"):
            continue
        for flag in flags_of(setting):
            given = arguments_of(f"{RUNS[run]} {flag}", "")
            if problems_of(given, RANKS):
                end, steps = end_of(given, RANKS, MOST_ROUNDS)
                endless += [f"{flag}\n" + "\n".join(steps)] if end == "does not end" else []
    assert not endless, "\n\n".join(endless)
