"""The model against a plain implementation: loss, logits and every gradient, in fp64."""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from split_schedules import one_rank, with_split_backward
from torch import Tensor
from torch.nn import functional as F

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.config.model_spec.stack import Stack
from megatrain.config.user_function import UserFunction
from megatrain.kernels.logit_scaling import LogitScaling
from megatrain.model.gpt import Model, build_model
from megatrain.model.head import _HeadLoss
from megatrain.model.user_loss import LossInputs, UserLoss
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.grid import RankGroup
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.pipeline.actions import Action
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.pipeline.segments import SegmentPass
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_parallel import VocabShard
from megatrain.tools.parity.measure import engine_of, tiny_plan
from megatrain.tools.parity.rows import Layout

VOCAB, SEQ, BATCH = 101, 12, 2
CPU = torch.device("cpu")


def _spec(*, is_tied: bool, padded: int = 128) -> ModelSpec:
    layer = LayerSpec(
        parts=(
            AttentionSpec(num_heads=4, num_query_groups=2, head_dim=8, rotary=RotarySpec(base=10000.0)),
            MlpSpec(ffn_hidden_size=24),
        )
    )
    return ModelSpec(
        hidden_size=16, vocab_size=VOCAB, padded_vocab_size=padded, stacks=(Stack(layers=(layer,) * 2),), is_tied=is_tied, init_std=0.2, output_init_std=0.1,
    )  # fmt: skip


class Recorder(DataParallel):
    """Data parallelism that records the hooks' calls."""

    def on_schedule(self, passes: Sequence[SegmentPass]) -> None:
        super().on_schedule(passes)
        self.expected = list(passes)
        self.begun: list[SegmentPass] = []
        self.ended: list[SegmentPass] = []
        self.ready: list[tuple[int, bool]] = []

    def before(self, segment_pass: SegmentPass) -> None:
        super().before(segment_pass)
        self.begun.append(segment_pass)

    def after(self, segment_pass: SegmentPass) -> None:
        super().after(segment_pass)
        self.ended.append(segment_pass)

    def on_gradients(self, segment: int, *, is_last: bool) -> None:
        super().on_gradients(segment, is_last=is_last)
        self.ready.append((segment, is_last))


class Built:
    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype = torch.float64, user_loss: UserLoss | None = None
    ) -> None:
        self.grid = build_grid(GridShape(), 0)
        self.model: Model = build_model(
            spec, self.grid, seq_length=SEQ, sequence_parallel=False, dtype=dtype, device=CPU,
            user_loss=user_loss,
        )  # fmt: skip
        self.buffers = allocate_buffers(
            self.model.registry,
            grid=self.grid,
            weight_dtype=dtype,
            grad_dtype=torch.promote_types(dtype, torch.float32),
            device=CPU,
        )
        fill_weights(self.buffers, InitialWeights(3))
        self.hooks = Recorder(self.buffers, self.grid)
        self.executor = Executor(
            self.model.segments, self.grid, hidden_shape=(SEQ, BATCH, spec.hidden_size), dtype=dtype, device=CPU,
            hooks=self.hooks,
        )  # fmt: skip

    def run(self, batches: list[Batch], actions: list[Action]) -> list[PassInfo]:
        infos = [PassInfo(microbatch=i, loss_scale=1 / len(batches)) for i in range(len(batches))]
        self.executor.run(actions, batches, infos)
        return infos

    @property
    def gradients(self) -> Tensor:
        return torch.cat(self.buffers.gradients.full)

    def gathered(self, flats: list[Tensor]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for bucket, flat in zip(self.buffers.buckets, flats, strict=True):
            for param in bucket.params:
                for box in param.entry.layout.ranges(0, param.entry.layout.numel):
                    first = param.start + box.offset
                    whole = tensors.setdefault(
                        box.piece.name, torch.full(box.piece.shape, math.nan).to(flat.dtype)
                    )
                    part = flat[first : first + box.numel].view(box.shape)
                    whole[tuple(slice(*edge) for edge in box.box)] = part
        return tensors


def _batches(count: int, seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
        mask = (torch.rand(BATCH, SEQ, generator=generator) < 0.7).float()
        yield Batch(
            tokens=ids[:, :-1],
            labels=ids[:, 1:],
            loss_mask=mask,
            position_ids=torch.arange(SEQ).expand(BATCH, -1),
        )


def plain_logits(weights: dict[str, Tensor], tokens: Tensor, spec: ModelSpec) -> Tensor:
    """Compute the same model as the papers describe it: [b, s] -> [b, s, v]."""
    x = weights["embedding.word_embeddings.weight"][tokens]
    b, s, _ = x.shape
    for number, layer in enumerate(spec.layers):
        w = {k.split(f"layers.{number}.")[1]: v for k, v in weights.items() if f"layers.{number}." in k}
        d = layer.mixer.head_dim
        y = F.rms_norm(x, x.shape[-1:], w["attention.norm.weight"], spec.norm.epsilon)
        q, k, v = (F.linear(y, w[f"attention.{p}.weight"]).view(b, s, -1, d).transpose(1, 2) for p in "qkv")
        angles = torch.outer(torch.arange(s).double(), 10000.0 ** (-torch.arange(0, d, 2).double() / d))
        rotation = torch.polar(torch.ones_like(angles), angles)
        q, k = (_rotated(p, rotation) for p in (q, k))
        k, v = (
            p.repeat_interleave(layer.mixer.num_heads // layer.mixer.num_query_groups, dim=1) for p in (k, v)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(
            torch.ones(s, s).triu(1).bool(), -math.inf
        )
        heads = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        x = x + F.linear(heads, w["attention.proj.weight"])
        y = F.rms_norm(x, x.shape[-1:], w["mlp.norm.weight"], spec.norm.epsilon)
        gated = F.silu(F.linear(y, w["mlp.gate.weight"])) * F.linear(y, w["mlp.up.weight"])
        x = x + F.linear(gated, w["mlp.down.weight"])
    x = F.rms_norm(x, x.shape[-1:], weights["decoder.final_norm.weight"], spec.norm.epsilon)
    output = "embedding.word_embeddings.weight" if spec.is_tied else "output_layer.weight"
    return F.linear(x, weights[output])


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    rotated = torch.complex(a, b) * rotation
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def users_loss(inputs):
    """The focal loss, with more weight of even inputs, large labels and late positions."""
    focal = (1 - (-inputs.cross_entropy).exp()) ** 2 * inputs.cross_entropy
    return focal * (1 + inputs.tokens % 2 + (inputs.labels > 50) + inputs.position_ids / 12)


def plain_loss(
    weights: dict[str, Tensor], batches: list[Batch], spec: ModelSpec, *, is_users: bool = False
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits = plain_logits(weights, batch.tokens, spec)
        labels = batch.labels.flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none", ignore_index=-100)
        if is_users:
            values = {
                name: getattr(batch, name).flatten()
                for name in ("labels", "loss_mask", "tokens", "position_ids")
            }
            losses = users_loss(LossInputs(cross_entropy=losses, **values))
        losses = losses + spec.z_loss_coeff * logits.flatten(0, 1).logsumexp(-1).square()
        mask = batch.loss_mask.flatten().double() * (labels != -100)
        total = total + (losses * mask).sum() / mask.sum() / len(batches)
    return total


@pytest.mark.parametrize("loss_kind", ["cross-entropy", "z-loss", "user's"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_loss_and_every_gradient_are_those_of_the_plain_model(
    is_tied: bool, is_split: bool, loss_kind: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(inspect.getsource(users_loss))
    function = UserFunction(str(tmp_path / "mine.py"), "users_loss", "--loss")
    spec = dataclasses.replace(
        _spec(is_tied=is_tied),
        z_loss_coeff=0.3 if loss_kind == "z-loss" else 0.0,
    )
    user_loss = UserLoss(function, VOCAB, CPU) if loss_kind == "user's" else None
    built, batches = Built(spec, user_loss=user_loss), list(_batches(3))
    ignored = batches[1].labels.masked_fill(batches[1].tokens < 30, -100)
    batches[1] = dataclasses.replace(batches[1], labels=ignored)  # counted again
    weights = {
        name: value.clone().requires_grad_()
        for name, value in built.gathered(built.buffers.weights.full).items()
    }
    loss = plain_loss(weights, batches, spec, is_users=user_loss is not None)
    loss.backward()
    actions = one_rank(3)
    infos = built.run(batches, with_split_backward(actions) if is_split else actions)
    found = sum(
        (info.sums["lm_loss"] + info.sums.get("z_loss", 0.0)) / info.sums["tokens"] / 3 for info in infos
    )
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    for name, gradient in built.gathered(built.buffers.gradients.full).items():
        torch.testing.assert_close(
            gradient, weights[name].grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    hooks = built.hooks
    assert hooks.expected == hooks.begun == hooks.ended
    assert len(hooks.begun) == 3 * 4 * (3 if is_split else 2)
    down = [3, 2, 1, 0]
    assert hooks.ready == [(n, False) for n in down] * 2 + [(n, True) for n in down]


def test_a_chunked_head_matches_a_head_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, batches = dataclasses.replace(_spec(is_tied=False), z_loss_coeff=0.3), list(_batches(1))
    whole, cut = Built(spec), Built(spec)
    whole.run(batches, one_rank(1))
    monkeypatch.setattr("megatrain.kernels.cross_entropy._MIN_CHUNK_BYTES", 128 * 5 * 8)
    monkeypatch.setattr("megatrain.kernels.cross_entropy._MAX_CHUNK_BYTES", 128 * 5 * 8)
    monkeypatch.setattr("megatrain.kernels.cross_entropy._ROW_MULTIPLE", 1)
    cut.run(batches, one_rank(1))
    torch.testing.assert_close(cut.gradients, whole.gradients, rtol=1e-10, atol=1e-13)


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    batches = list(_batches(1))
    losses = []
    for padded in (101, 128, 256):
        (info,) = Built(_spec(is_tied=True, padded=padded)).run(batches, one_rank(1))
        losses.append(info.sums["lm_loss"].item())
    assert losses[0] == losses[1] == losses[2]


def test_the_z_loss_is_not_in_the_logged_loss() -> None:
    (batch,) = _batches(1)
    sums = []
    for z_loss_coeff in (0.0, 0.3):
        spec = dataclasses.replace(_spec(is_tied=True), z_loss_coeff=z_loss_coeff)
        (info,) = Built(spec).run([batch], one_rank(1))
        sums.append(info.sums)
    assert sums[0]["lm_loss"] == sums[1]["lm_loss"]
    assert "z_loss" not in sums[0]
    assert sums[1]["z_loss"] > 0


def test_labels_of_masked_tokens_may_have_any_value_and_others_must_be_ids() -> None:
    (batch,) = _batches(1)
    hidden = dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.loss_mask == 0, 10**9))
    wrong = dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.loss_mask == 1, VOCAB))
    sums = [Built(_spec(is_tied=True)).run([b], one_rank(1))[0].sums for b in (batch, hidden, wrong)]
    assert sums[0]["lm_loss"] == sums[1]["lm_loss"]
    assert sums[2]["lm_loss"] == math.inf


def test_a_microbatch_whose_mask_is_empty_gives_no_loss_and_no_gradient() -> None:
    built, (batch,) = Built(_spec(is_tied=False)), _batches(1)
    empty = Batch(
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=torch.zeros(BATCH, SEQ),
        position_ids=batch.position_ids,
    )
    (info,) = built.run([empty], one_rank(1))
    assert info.sums["lm_loss"].item() == 0.0
    assert not built.gradients.any()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_head_keeps_no_gradient_of_logits_for_the_weight_action(is_frozen: bool) -> None:
    weight = torch.randn(12, 8)
    vocab, scaling = VocabShard(RankGroup("tp", (0,), 0), 12, 12), LogitScaling(1.0, None)
    *_, loss = _HeadLoss.apply(
        torch.randn(6, 8, requires_grad=True), weight, None if is_frozen else torch.zeros_like(weight), None,
        torch.arange(6), torch.ones(6), vocab, scaling, 0.0, None, PassInfo(splits_backward=True), None, None,
    )  # fmt: skip
    assert bool(loss.grad_fn.kept) is not is_frozen


@pytest.mark.parametrize("is_residual_fp32", [False, True])
def test_bfloat16_stays_near_fp64(is_residual_fp32: bool) -> None:
    batches = list(_batches(1))
    spec = dataclasses.replace(_spec(is_tied=False), is_residual_fp32=is_residual_fp32)
    fp64, bf16 = Built(spec), Built(spec, torch.bfloat16)
    assert bf16.model.hidden_dtype == (torch.float32 if is_residual_fp32 else torch.bfloat16)
    (expected,) = fp64.run(batches, one_rank(1))
    (found,) = bf16.run(batches, one_rank(1))
    assert found.sums["lm_loss"].item() == pytest.approx(expected.sums["lm_loss"].item(), rel=0.01)
    assert bf16.gradients.dtype == torch.float32
    difference = (bf16.gradients - fp64.gradients).norm() / fp64.gradients.norm()
    assert difference < 0.05


def test_yarn_rotates_all_channels_and_scales_by_its_own_factor_alone() -> None:
    """As in Megatron-LM, which ignores the share of rotated channels and the factor of interpolation there."""
    yarn = (
        "--position-embedding-type yarn --yarn-original-max-position-embeddings 8 --rotary-scaling-factor 4"
    )
    ignored = "--rotary-percent 0.5 --rotary-seq-len-interpolation-factor 2"
    plain, both = (
        engine_of(tiny_plan(Layout.of(""), 1, *flags.split()), 0).model.spec.layers
        for flags in (yarn, f"{yarn} {ignored}")
    )
    assert plain == both
    assert isinstance(plain[0].mixer, AttentionSpec)
    assert plain[0].mixer.rotary is not None
