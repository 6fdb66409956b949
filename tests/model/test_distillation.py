"""The losses against a teacher equal an independent computation in fp64: values, gradients, and the weights that mix them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatrain.kernels.divergence import divergence_gradient, divergences, rescaled, statistics
from megatrain.model.distillation import CachedDivergence, DistilledHead, TopTargets
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.tensor_parallel import VocabShard, vocab_parallel_cross_entropy
from megatrain.tools.parity.measure import chunked_loss, engine_of, local_batches, tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.training.engine import Engine

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
TEACHER = "--export-kd-teacher-load drawn"
SCALE = 0.25


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of softmaxes of rows of logits."""
    return F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_and_its_gradient_are_those_of_torch(temperature: float, *, is_reversed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 7, 13, dtype=torch.float64, generator=generator).mul(4).unbind()
    scale = torch.rand(7, dtype=torch.float64, generator=generator)
    real = student[:, :11].clone().requires_grad_()
    first, second = real / temperature, teacher[:, :11] / temperature
    expected = kl(first, second) if is_reversed else kl(second, first)
    (expected * scale).sum().backward()
    known = statistics(student, teacher, temperature, 11, is_reversed=is_reversed)
    largest = known[:2] + 1
    sums = rescaled(known, largest, is_reversed=is_reversed)
    losses, log_sums = divergences(sums, largest, is_reversed=is_reversed)
    found = divergence_gradient(
        student, teacher, log_sums, losses, scale / temperature, temperature, 11, is_reversed=is_reversed
    )
    assert torch.allclose(losses, expected, **CLOSE)
    assert torch.allclose(found[:, :11], real.grad, **CLOSE)
    assert not found[:, 11:].any()


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("", ""),
        ("", "--kd-temperature 3"),
        ("", "--kd-loss reverse_kl --kd-temperature 0.5"),
        ("", "--no-kd-skip-lm-loss"),
        ("zloss", "--no-kd-skip-lm-loss --no-kd-balance-losses --kd-loss-scale 0.3"),
        ("", "--kd-layer-pairs final:final"),
        ("", "--kd-layer-pairs final:final:mse --no-kd-balance-losses --kd-layer-loss-scale 0.7"),
        ("", "--kd-layer-pairs final:final:mse final:final:cosine --no-kd-skip-lm-loss"),
        ("tied chunkedloss", "--no-kd-skip-lm-loss --kd-temperature 2 --kd-loss reverse_kl"),
        ("gemma2 padded120", "--no-kd-skip-lm-loss --kd-temperature 2"),
    ],
)
def test_the_head_trains_on_an_independent_sum_of_losses(words: str, flags: str) -> None:
    layout = Layout.of(words)
    engine = engine_of(tiny_plan(layout, 1, *TEACHER.split(), *flags.split()), 0)
    batch = next(iter(local_batches(0, layout, 0)))
    head = engine.model.segments[-1]
    assert isinstance(head, DistilledHead)
    hidden = torch.randn(24, 2, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    info = PassInfo(loss_scale=SCALE)
    with chunked_loss():
        loss = head(hidden, batch, info)
    loss.backward()
    owner = head._output()
    weight = owner.weight.detach().clone().requires_grad_()
    other = hidden.detach().clone().requires_grad_()
    projections = [
        one.projection.detach().clone().requires_grad_() if hasattr(one, "projection") else None
        for one in head.final_losses
    ]
    expected = expected_losses(engine, head, other, weight, projections, batch)
    total = weighted(engine, expected) * SCALE / batch.loss_mask.sum()
    total.backward()
    tokens = batch.loss_mask.sum()
    for name, values in expected.items():
        assert torch.allclose(info.sums[name], values.sum(), **CLOSE), name
    assert info.sums["tokens"] == tokens
    assert hidden.grad is not None
    assert torch.allclose(hidden.grad, other.grad, **CLOSE)
    assert torch.allclose(owner.weight_grads["weight"], weight.grad, **CLOSE)
    for module, projection in zip(head.final_losses, projections, strict=True):
        assert projection is not None
        assert torch.allclose(module.weight_grads["projection"], projection.grad, **CLOSE)


def expected_losses(
    engine: Engine,
    head: DistilledHead,
    hidden: Tensor,
    weight: Tensor,
    projections: list[Tensor | None],
    batch: Batch,
) -> dict[str, Tensor]:
    """Return the masked losses of all tokens, [s, b], by the names of their sums, with plain torch."""
    distillation = engine.model.distillation
    assert distillation is not None
    spec, vocab = distillation.spec, engine.model.spec.vocab_size
    mask, labels = batch.loss_mask.t().double(), batch.labels.t()
    assert head.norm is not None
    normed = head.norm(hidden, PassInfo(is_training=False))
    logits = capped(normed @ weight[:vocab].t(), engine.model.spec.logit_softcap)
    outputs = distillation.teacher.outputs(batch, PassInfo())
    teacher_weight = distillation.teacher.head._output().weight[:vocab]
    teacher = capped(outputs.normed @ teacher_weight.t(), 5.0)
    lm = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(mask)
    t = spec.temperature
    pair = (logits / t, teacher / t) if spec.is_reversed else (teacher / t, logits / t)
    found = {"lm_loss": lm * mask, "kd_loss": kl(*pair) * t**2 * mask}
    if engine.model.spec.z_loss_coeff:
        found["z_loss"] = engine.model.spec.z_loss_coeff * logits.logsumexp(-1) ** 2 * mask
    for number, projection in enumerate(projections):
        assert projection is not None
        x, kind = normed @ projection.t(), spec.pairs[number].loss
        cosine = (x * outputs.normed).sum(-1) / (x.norm(dim=-1) * outputs.normed.norm(dim=-1))
        losses = 1 - cosine if kind == "cosine" else ((x - outputs.normed) ** 2).mean(-1)
        found[f"kd_pair_{number}"] = losses * mask
    return found


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def weighted(engine: Engine, losses: dict[str, Tensor]) -> Tensor:
    """Return the sum that is trained, from sums over tokens."""
    distillation = engine.model.distillation
    assert distillation is not None
    spec, sums = distillation.spec, {name: values.sum() for name, values in losses.items()}
    pairs = [value for name, value in sums.items() if name.startswith("kd_pair")]
    lm, kd, of_pairs = sums["lm_loss"], sums["kd_loss"], sum(pairs, torch.zeros(())) / max(len(pairs), 1)
    lm = lm + sums.get("z_loss", 0)
    if not spec.is_balanced or not (spec.lm_weight or pairs):
        return spec.lm_weight * lm + spec.kd_weight * (kd + spec.layer_weight * of_pairs)
    both = kd + (of_pairs * (kd / of_pairs).detach() if pairs else 0)
    return lm + both * (sums["lm_loss"] / both).detach() if spec.lm_weight else both


def test_a_matched_layer_gets_the_gradient_of_its_pairs() -> None:
    """The gradients of two layers' outputs add to that of the logits, with the weight that the head computes after them."""
    flags = f"{TEACHER} --kd-layer-pairs 1:4:mse 1:0:cosine --no-kd-skip-lm-loss".split()
    engine = engine_of(tiny_plan(Layout.of(""), 1, *flags), 0)
    batch = next(iter(local_batches(0, Layout.of(""), 0)))
    layer, info = engine.model.segments[2], PassInfo(loss_scale=SCALE)
    hidden = torch.randn(24, 2, 48, dtype=torch.float64).requires_grad_()
    dy = torch.randn(24, 2, 48, dtype=torch.float64)
    y = layer(hidden, batch, info)
    distillation = engine.model.distillation
    assert distillation is not None
    distillation.layer_weight = torch.tensor(7.0, dtype=torch.float64)
    y.backward(dy)
    other = hidden.detach().clone().requires_grad_()
    x = layer.layer(other, batch, PassInfo())
    kept = distillation.teacher.outputs(batch, info).layers
    projections = [loss.projection.detach() for loss in layer.losses]
    mask = batch.loss_mask.t()
    squares = ((x @ projections[0].t() - kept[4]) ** 2).mean(-1)
    cosines = 1 - F.cosine_similarity(x @ projections[1].t(), kept[0], dim=-1)
    assert torch.allclose(info.sums["kd_pair_0"], (squares * mask).sum(), **CLOSE)
    assert torch.allclose(info.sums["kd_pair_1"], (cosines * mask).sum(), **CLOSE)
    scaled = 7 * SCALE * ((squares + cosines) * mask).sum() / (2 * mask.sum())
    (scaled + (x * dy).sum()).backward()
    assert torch.allclose(hidden.grad, other.grad, **CLOSE)


def test_an_evaluation_asks_no_teacher() -> None:
    engine = engine_of(tiny_plan(Layout.of(""), 1, *TEACHER.split()), 0)
    batch, info = next(iter(local_batches(0, Layout.of(""), 0))), PassInfo(is_training=False)
    distillation = engine.model.distillation
    assert distillation is not None
    with torch.no_grad():
        engine.model.segments[-1](torch.randn(24, 2, 48, dtype=torch.float64), batch, info)
    assert set(info.sums) == {"lm_loss", "tokens"}
    assert not distillation.teacher.head.found  # type: ignore[attr-defined]


def test_a_teacher_is_frozen_and_has_no_dropout() -> None:
    """Its outputs are equal in every pass, though its model has dropout, and nothing of it is differentiated or counted."""
    engine = engine_of(tiny_plan(Layout.of(""), 1, *TEACHER.split()), 0)
    batch = next(iter(local_batches(0, Layout.of(""), 0)))
    distillation = engine.model.distillation
    assert distillation is not None
    teacher = distillation.teacher
    assert any(layer.attention.dropout for layer in distillation.spec.teacher.layers if layer.attention)
    first = teacher.outputs(batch, PassInfo(first_sample=0)).normed
    teacher.forget()  # type: ignore[attr-defined]
    assert torch.equal(first, teacher.outputs(batch, PassInfo(first_sample=5)).normed)
    assert not first.requires_grad
    own = {id(entry.module) for entry in engine.model.registry.entries.values()}
    assert all(id(entry.module) not in own for entry in teacher.model.registry.entries.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("k", [1, 5, 11])
@pytest.mark.parametrize("mixed", [0.0, 0.6])
def test_cached_tokens_give_the_divergence_of_k_tokens_and_the_rest(k: int, mixed: float) -> None:
    """Independent: the KL of k + 1 outcomes, differentiated by torch, with a share of the cross-entropy; z-loss too."""
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 6, 13, dtype=torch.float64, generator=generator).mul(2).unbind()
    labels, scale = torch.randint(11, (6,), generator=generator), torch.rand(6, dtype=torch.float64)
    top = teacher[:, :11].log_softmax(-1).topk(k)
    rest = (1 - top.values.exp().sum(-1)).clamp(min=0)
    rest = torch.zeros_like(rest) if k == 11 else rest
    real = student[:, :11].clone().requires_grad_()
    own = real.log_softmax(-1)
    of_top = own.gather(1, top.indices)
    expected = (top.values.exp() * (top.values - of_top)).sum(-1)
    if k < 11:
        expected = expected + rest * (rest.log() - (1 - of_top.exp().sum(-1)).log())
    lm = F.cross_entropy(real, labels, reduction="none") + 0.1 * real.logsumexp(-1) ** 2
    ((0.7 * expected + mixed * lm) * scale).sum().backward()
    vocab = VocabShard(RankGroup("alone", (0,), 0), 13, 11)
    targets = TopTargets(top.indices, top.values, rest.log(), torch.ones(6, dtype=torch.bool))
    found = CachedDivergence(targets, vocab, 0.7 * scale)
    gradient = found.begin(student, slice(0, 100), 1.0)
    known = vocab_parallel_cross_entropy(student.clone(), labels, vocab)
    dlogits = gradient(known, mixed * scale, vocab, torch.float64, z_loss_coeff=0.1)
    assert torch.allclose(found.losses, expected, **CLOSE)
    assert torch.allclose(dlogits[:, :11], real.grad, **CLOSE)
    assert not dlogits[:, 11:].any()


def test_cached_tokens_of_another_sample_are_infinitely_wrong() -> None:
    student = torch.randn(2, 7, dtype=torch.float64)
    vocab = VocabShard(RankGroup("alone", (0,), 0), 7, 7)
    ids, values = torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1), -1.0, dtype=torch.float64)
    targets = TopTargets(ids, values, torch.full((2,), -1.0), torch.tensor([True, False]))
    found = CachedDivergence(targets, vocab, torch.ones(2, dtype=torch.float64))
    gradient = found.begin(student, slice(0, 2), 1.0)
    known = vocab_parallel_cross_entropy(student.clone(), ids[:, 0], vocab)
    dlogits = gradient(known, torch.zeros(2, dtype=torch.float64), vocab, torch.float64)
    assert found.losses.isfinite().tolist() == [True, False]
    assert dlogits.isfinite().all(1).tolist() == [True, False]
