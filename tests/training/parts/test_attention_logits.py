"""The largest attention logits of a step against all scores in memory, and QK-Clip against its formula."""

import math

import pytest
import torch

from megatrain.model.latent_attention import ExpandedAttention
from megatrain.model.layer import Attention
from megatrain.parallel.context.largest_logits import largest_causal_logits
from megatrain.parallel.context_parallel import ContextParallel
from megatrain.parallel.documents import Documents
from megatrain.parallel.grid import RankGroup
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_schedules

ALONE = ContextParallel(RankGroup("cp", (0,), 0))


def all_scores(q, k, scale, window, documents):
    """Return the scores of causal attention, [b, n, s, s], -inf where a query does not attend."""
    s, keys = q.shape[0], k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    distance = torch.arange(s)[:, None] - torch.arange(s)
    allowed = (distance >= 0) & (distance <= (s if window is None else window))
    if documents is not None:
        ids = documents.document_ids
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])[:, None]
    return (torch.einsum("sbnd,tbnd->bnst", q, keys) * scale).masked_fill(~allowed, -math.inf)


@pytest.mark.parametrize("window", [None, 5, 0])
@pytest.mark.parametrize("has_documents", [False, True])
def test_blocks_find_the_largest_logit_of_each_head(window, has_documents):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-9, 10, (19, 2, heads, 4), generator=generator).double() for heads in (6, 2))
    k *= (
        torch.arange(19).view(-1, 1, 1, 1) < 15
    )  # late keys and other documents' would be found by a wrong mask
    q[12:] *= 100
    cuts = torch.tensor([0, 3, 13, 19, 30, 38], dtype=torch.int32)
    documents = Documents(cuts, 11, 2, 19) if has_documents else None
    expected = all_scores(q, k, 0.5, window, documents).amax((0, 2, 3))
    for block in (4, 7, 1024):
        found = largest_causal_logits(q, k, ALONE, scale=0.5, window=window, documents=documents, block=block)
        assert torch.equal(found, expected)


THRESHOLD, ALPHA = 1e-3, 0.3


def step_of(words):
    """Run a step; return the weights by name, the largest logits by name of the attention, and the report."""
    layout = Layout.of(words)
    plan = tiny_plan(layout, 1)
    engine, largest = engine_of(plan, 0), {}
    branches = [m for one in engine.model.segments for m in one.modules()]
    branches = [m for m in branches if isinstance(m, Attention | ExpandedAttention)]
    specs = [layer.attention for layer in plan.derived.model_spec.layers]

    def observe(number, spec):
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale

        def hook(_, arguments):
            q, k, _, info = arguments
            found = all_scores(q.detach(), k.detach(), scale, spec.window, info.documents).amax((0, 2, 3))
            largest[number] = torch.maximum(largest.get(number, found), found)

        return hook

    for number, (branch, spec) in enumerate(zip(branches, specs, strict=True)):
        branch.core.register_forward_pre_hook(observe(number, spec))
    report = engine.step(list(local_batches(0, layout, 0)), build_schedules(plan).at(0))
    weights = {part.name: torch.from_numpy(part.values) for part in weights_of(engine)}
    return weights, largest, report, specs


@pytest.mark.parametrize("words", ["", "documents gemma2 muon", "mla uniform"])
def test_projections_of_heads_above_the_threshold_are_scaled(words):
    weights, largest, report, specs = step_of(words)
    clipped, _, found, _ = step_of(f"{words} qkclip")
    assert report.max_attention_logit is None
    assert found.max_attention_logit == pytest.approx(
        max(float(x.max()) for x in largest.values()), rel=1e-12
    )
    num_scaled = 0
    for number, spec in enumerate(specs):
        groups = spec.num_query_groups if spec.latent is None else spec.num_heads
        eta = (THRESHOLD / largest[number].view(groups, -1).amax(1)).clamp(max=1.0)
        eta[largest[number].view(groups, -1).amax(1) <= THRESHOLD] = 1.0
        num_scaled += int((eta < 1).sum())
        prefix = f"decoder.layers.{number}.attention"
        for name, exponents in exponents_of(spec).items():
            factors = eta.repeat_interleave(
                len(exponents) * spec.num_heads // groups if name == "q" else len(exponents)
            )
            channels = torch.tensor(exponents, dtype=torch.float64).repeat(len(factors) // len(exponents))
            weight = weights.pop(f"{prefix}.{name}.weight")
            expected = weight * factors.pow(channels)[:, None]
            torch.testing.assert_close(clipped.pop(f"{prefix}.{name}.weight"), expected, rtol=1e-12, atol=0)
    assert num_scaled > 0
    assert all(torch.equal(clipped[name], weight) for name, weight in weights.items())


def exponents_of(spec):
    """Return the exponents of eta of a head's channels, by projection: Kimi K2, arXiv:2507.20534, section 2.1."""
    if spec.latent is None:
        return {"q": [ALPHA] * spec.head_dim, "k": [1 - ALPHA] * spec.head_dim}
    nope, rope = spec.latent.qk_nope_head_dim, spec.latent.qk_rope_head_dim
    return {
        "q_up": [ALPHA] * nope + [1.0] * rope,
        "kv_up": [1 - ALPHA] * nope + [0.0] * spec.latent.v_head_dim,
    }


def test_evaluation_measures_nothing():
    layout = Layout.of("qkclip")
    engine = engine_of(tiny_plan(layout, 1), 0)
    batch = next(local_batches(0, layout, 0))
    (info,) = engine.pass_infos([batch], first_sample=0)
    info.is_training = False
    hidden = None
    for segment in engine.model.segments[:-1]:
        hidden = segment(hidden, batch, info)
    assert engine.attention_logits.values.max() == -math.inf
