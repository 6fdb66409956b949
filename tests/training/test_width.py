"""muP: sizes of activations, learning rates and initial values as the width changes."""

import math
from typing import get_args

import pytest
import torch

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.derive.lr_schedule import ParamKind
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine

VOCAB, SEQ, MICRO_BATCH, STEPS = 97, 16, 8, 5
WIDTHS = (64, 128, 256)
BASE = 64


def plan_of(width: int, flags: str = "") -> Plan:
    request = parse(
        f"--num-layers 2 --hidden-size {width} --num-attention-heads 4 --normalization RMSNorm --swiglu"
        f" --ffn-hidden-size {2 * width} --position-embedding-type rope --disable-bias-linear --hidden-dropout 0"
        f" --attention-dropout 0 --init-method-std 0.1 --embedding-init-method-std 0.01 --seq-length {SEQ} --micro-batch-size {MICRO_BATCH}"
        f" --train-iters {STEPS} --lr 1e-2 --lr-decay-style constant --weight-decay 0 --clip-grad 0 --mock-data"
        f" --vocab-size {VOCAB} --device cpu {flags}".split()
    )
    return resolve(request, Facts(vocab_size=VOCAB, eod_id=VOCAB - 1))


def engine_of(plan: Plan) -> Engine:
    engine = Engine(plan, build_grid(GridShape(), 0), torch.device("cpu"))
    engine.initialize()
    return engine


def batch_of(step: int) -> Batch:
    tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(MICRO_BATCH, SEQ),
        position_ids=torch.arange(SEQ).expand(MICRO_BATCH, SEQ),
    )


def activations(engine: Engine, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the output of each segment; that of the last are logits."""
    info = PassInfo(microbatch=0, is_training=False)
    found: dict[str, torch.Tensor] = {}
    hidden = None
    with torch.no_grad():
        for number, segment in enumerate(engine.model.segments[:-1]):
            hidden = segment(hidden, batch, info)
            found["embedding" if number == 0 else f"layer {number}"] = hidden
        head = engine.model.segments[-1]
        found["logits"] = head.logits(hidden, info)  # type: ignore[operator]
    return found


def growth(flags: str) -> dict[str, float]:
    """Return the power of the width with which each activation's mean change over a few steps grows."""
    sizes: dict[str, list[float]] = {}
    for width in WIDTHS:
        plan = plan_of(width, flags)
        engine = engine_of(plan)
        before = activations(engine, batch_of(0))
        for _ in range(STEPS):
            engine.step([batch_of(0)], build_schedules(plan).at(0))
        for name, now in activations(engine, batch_of(0)).items():
            sizes.setdefault(name, []).append((now - before[name]).abs().mean().item())
    return {
        name: math.log(found[-1] / found[0]) / math.log(WIDTHS[-1] / WIDTHS[0])
        for name, found in sizes.items()
    }


MUP = f"--use-mup --mup-base-hidden-size {BASE} --mup-base-head-dim {BASE // 4}"


def test_with_mup_activations_move_alike_at_every_width() -> None:
    """The coordinate check of the paper (arXiv:2203.03466, section D.1): changes grow with the width only without muP."""
    usual, scaled = growth(""), growth(MUP)
    for name in ("layer 1", "layer 2"):
        assert usual[name] > 1.0
        assert abs(scaled[name]) < 0.15
    assert usual["logits"] > 0.25
    assert abs(scaled["logits"]) < 0.15


def test_an_output_layer_of_its_own_wants_a_rate_of_its_own() -> None:
    """Megatron-LM divides its rate by the width as well as the logits; a note says so, and what to give."""
    flags = f"--untie-embeddings-and-output-weights {MUP}"
    assert growth(flags)["logits"] < -0.5
    assert abs(growth(f"{flags} --decoupled-lr 1e-2")["logits"]) < 0.2
    assert any("--decoupled-lr 0.01" in note for note in plan_of(2 * BASE, flags).notes)


def rates_and_shares(plan: Plan) -> dict[str, tuple[float, float]]:
    groups = plan.derived.lr_groups
    trained = [kind for kind in get_args(ParamKind) if kind != "scale"]
    return {kind: (groups.of(kind).lr, groups.of(kind).eps_scale) for kind in trained}


def test_adam_scales_matrices_and_the_output_layer() -> None:
    plan = plan_of(4 * BASE, f"--untie-embeddings-and-output-weights --min-lr 1e-3 {MUP}")
    base, slow = (1e-2, 1.0), (2.5e-3, 0.25)
    assert rates_and_shares(plan) == {
        "matrix": slow,
        "vector": base,
        "embedding": base,
        "positions": base,
        "output": slow,
    }
    assert plan.derived.lr_groups.of("matrix").min_lr == 2.5e-4
    assert str(plan.derived.lr_groups) == "matrix, output: 0.0025; vector, embedding, positions: 0.01"


def test_muons_matrices_keep_their_rate() -> None:
    found = rates_and_shares(
        plan_of(4 * BASE, f"--optimizer muon --untie-embeddings-and-output-weights {MUP}")
    )
    assert found.pop("output") == (2.5e-3, 1.0)
    assert set(found.values()) == {(1e-2, 1.0)}


def test_a_decoupled_rate_is_taken_as_it_is() -> None:
    found = rates_and_shares(plan_of(4 * BASE, f"--decoupled-lr 5e-3 {MUP}"))
    assert [found[kind][0] for kind in ("matrix", "vector", "embedding", "output")] == [
        2.5e-3,
        1e-2,
        5e-3,
        5e-3,
    ]
    assert found["output"][1] == 0.25


def test_sgd_scales_vectors_and_tables() -> None:
    found = rates_and_shares(plan_of(4 * BASE, f"--optimizer sgd {MUP}"))
    assert {kind: lr for kind, (lr, _) in found.items()} == {
        "matrix": 1e-2,
        "vector": 4e-2,
        "embedding": 4e-2,
        "positions": 4e-2,
        "output": 1e-2,
    }


def test_each_parameter_steps_at_the_rate_of_its_kind() -> None:
    """The size of Adam's first step is the learning rate for every gradient."""
    plan = plan_of(2 * BASE, f"--untie-embeddings-and-output-weights {MUP}")
    engine = engine_of(plan)
    before = [weights.clone() for weights in engine.buffers.weights.full]
    engine.step([batch_of(0)], build_schedules(plan).at(0))
    steps: dict[str, float] = {}
    for bucket, old, new in zip(engine.buffers.buckets, before, engine.buffers.weights.full, strict=True):
        for param in bucket.params:
            part = slice(param.start, param.stop)
            steps[param.entry.layout.pieces[0].name] = (new[part] - old[part]).abs().max().item()
    for name, step in steps.items():
        is_slow = name == "output_layer.weight" or ("norm" not in name and name.startswith("decoder.layers"))
        assert step == pytest.approx(5e-3 if is_slow else 1e-2, rel=1e-2), name


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
def test_initial_matrices_shrink_with_the_width(flags: str) -> None:
    engine = engine_of(plan_of(4 * BASE, f"{flags} {MUP}"))
    found = {
        box.piece.name: flat[place].std()
        for shard, flat in zip(engine.buffers.shards, engine.buffers.weights.shards, strict=True)
        for _, box, place in shard.owned()
    }
    expected = {
        "embedding.word_embeddings.weight": 0.01,
        "decoder.layers.0.attention.q.weight": 0.1 / 2,
        "decoder.layers.1.attention.v.weight": 0.1 / 2,
        "decoder.layers.1.attention.proj.weight": 0.1 / 2 / 2,
        "decoder.layers.0.mlp.down.weight": 0.1 / 2 / 2,
    } | ({"output_layer.weight": 0.01} if flags else {})
    for name, std in expected.items():
        assert found[name].item() == pytest.approx(std, rel=0.03), name


def scale_of(plan: Plan) -> float | None:
    """Return the factor of attention scores."""
    mixer = plan.derived.model_spec.layers[0].attention
    assert mixer is not None
    return mixer.scale


def test_scores_logits_and_embeddings_are_scaled() -> None:
    plan = plan_of(4 * BASE, f"{MUP} --mup-embedding-mult 3")
    assert scale_of(plan) == 16**0.5 / 64
    assert plan.config.model.mup_output_mult == 0.25
    plain = engine_of(plan_of(4 * BASE, f"{MUP} --mup-embedding-mult 1 --mup-output-mult 0.5"))
    ours = engine_of(plan)
    for mine, theirs in zip(ours.buffers.weights.full, plain.buffers.weights.full, strict=True):
        assert torch.equal(mine, theirs)
    found, other = activations(ours, batch_of(0)), activations(plain, batch_of(0))
    torch.testing.assert_close(found["embedding"], other["embedding"] * 3)
    assert scale_of(plan_of(4 * BASE, f"{MUP} --mup-attn-scale-power 0.5")) == 16**0.5 / 8
    logits = engine_of(plan_of(4 * BASE, f"{MUP} --mup-output-mult 0.5 --mup-embedding-mult 3"))
    torch.testing.assert_close(activations(logits, batch_of(0))["logits"], found["logits"] * 2)


def test_an_output_multiplier_of_one_stands_for_the_width() -> None:
    plan = plan_of(4 * BASE, f"{MUP} --mup-output-mult 1")
    assert plan.config.model.mup_output_mult == 0.25
    assert any("--mup-output-mult 1 with --use-mup" in note for note in plan.notes)


def test_without_a_base_nothing_but_attention_is_scaled() -> None:
    plan = plan_of(BASE, "--use-mup")
    assert plan.config.model.mup_width_mult == plan.config.model.mup_output_mult == 1
    assert scale_of(plan) == 1 / 16
    assert any("--mup-base-hidden-size" in note and "64" in note for note in plan.notes)


def test_weight_decay_reaches_query_and_key_norms_if_asked_for() -> None:
    for flags, expected in (("", False), ("--apply-wd-to-qk-layernorm", True)):
        engine = engine_of(plan_of(BASE, f"--qk-layernorm {flags}"))
        decays = {e.layout.pieces[0].name: e.layout.decays for e in engine.model.registry.entries.values()}
        assert decays["decoder.layers.0.attention.q_norm.weight"] is expected
        assert decays["decoder.layers.1.attention.k_norm.weight"] is expected
        assert not decays["decoder.layers.0.attention.norm.weight"]
