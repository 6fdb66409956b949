"""What is copied to host memory, when its memory on the device is free, and when it is back."""

from __future__ import annotations

import pytest
import torch
from everyday import nightly, only
from torch import Tensor, nn

from megatrain.kernels.host_copy import HostBuffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.pipeline.actions import ActionKind
from megatrain.parallel.pipeline.activation_offload import ActivationOffload
from megatrain.parallel.pipeline.segments import SegmentHooks, SegmentPass
from megatrain.tools.parity.measure import engine_of, local_batches, tiny_plan, weights_of
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_schedules

CPU = torch.device("cpu")


class Square(nn.Module):
    """x^2 + w x. Autograd saves x and w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 2.0))

    def forward(self, hidden: Tensor, batch: Batch, info: PassInfo) -> Tensor:
        return hidden * hidden + self.weight * hidden[:, :].view(6, 4)


def passes(*kinds: tuple[ActionKind, int]) -> list[SegmentPass]:
    return [SegmentPass(kind, number) for kind, number in kinds]


def test_memory_is_free_after_the_next_segment_and_back_before_the_backward_pass() -> None:
    offload, batch = ActivationOffload(SegmentHooks(), CPU, 0), object()
    segments = [offload.segment(number, Square(), is_whole=True) for number in range(3)]
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    schedule = passes(*((forward, n) for n in range(3)), *((backward, n) for n in (2, 1, 0)))
    offload.on_schedule(schedule)
    leaves, outputs, hidden = [], [], torch.arange(24.0).view(6, 4)
    for one in schedule[:3]:
        offload.before(one)
        leaf = hidden.detach().clone().requires_grad_()
        outputs.append(segments[one.segment](leaf, batch, PassInfo()))  # type: ignore[arg-type]
        leaves.append((hidden.clone(), leaf))
        hidden = outputs[-1].detach()
        offload.after(one)
    held = [list(offload._waiting[n][0].storages.values()) for n in range(3)]
    weights = [[one for one in group if one.on_host is None] for group in held]
    inputs = [[one for one in group if one.on_host is not None] for group in held]
    assert [len(one) for one in inputs] == [1, 1, 1]  # views of one storage are copied once
    assert all(one.on_device is not None for group in weights for one in group)
    assert [one.on_device is None for (one,) in inputs] == [True, True, False]
    assert offload.buffers.num_bytes == 3 * 24 * 4
    for number, one in zip((2, 1, 0), schedule[3:], strict=True):
        offload.before(one)
        assert all(storage.on_device is not None for storage in held[number])
        if number:
            assert all(storage.on_device is not None for storage in held[number - 1])  # one pass ahead
        outputs[number].sum().backward()
        value, leaf = leaves[number]
        assert leaf.untyped_storage().nbytes() == 4  # of one element: the leaf holds no activations
        assert torch.equal(leaf.grad, 2 * value + 2)
        offload.after(one)
    assert not any(offload._waiting.values())


def test_buffers_are_used_again() -> None:
    buffers = HostBuffers(CPU)
    first = buffers.take(100, None)
    buffers.give_back(first, None)
    assert buffers.take(60, None) is first
    assert buffers.take(60, None) is not first
    assert buffers.num_bytes == 160


def test_small_tensors_and_evaluation_stay() -> None:
    offload = ActivationOffload(SegmentHooks(), CPU, 25)
    segment = offload.segment(0, Square(), is_whole=True)
    leaf = torch.ones(6, 4, requires_grad=True)
    segment(leaf, object(), PassInfo(is_training=False))  # type: ignore[arg-type]
    assert leaf.untyped_storage().nbytes() == 96
    assert not offload._waiting[0]
    segment(leaf, object(), PassInfo())  # type: ignore[arg-type]
    assert not offload._waiting[0][0].storages


KINDS = [
    "mixtral offloadqkv",
    "offloadlayers",
    "offloadmodules recomputenorms",
    "offloadqkv",
    "block offloadinputs",
    "deepseek mla offloadlayers",
    "mixtral offloadmodules",
    "qwen3-next offloadmodules",
    "fp8delayed offloadlayers",
    "t5 offloadmodules",
    "vlm offloadlayers",
    "hybrid offloadlayers",
    "gpt2 offloadlayers",
]


@pytest.mark.parametrize("words", only(KINDS[:1], KINDS))
def test_a_step_has_the_same_bits_and_less_memory(words: str) -> None:
    layout, weights = Layout.of(words), []
    for one in (layout, layout.but("keepactivations")):
        engine = engine_of(tiny_plan(one, 1), 0)
        for step in range(2):
            engine.step(list(local_batches(step, one, 0)), build_schedules(engine.plan).at(step))
        weights.append(weights_of(engine))
        if one is layout:
            hooks = engine.executor.hooks
            assert isinstance(hooks, ActivationOffload)
            assert hooks.buffers.num_bytes > 0
    assert all(
        torch.equal(torch.as_tensor(a.values), torch.as_tensor(b.values))
        for a, b in zip(*weights, strict=True)
    )


@pytest.mark.parametrize("words", ["recomputenorms", nightly("norecompute")])
def test_inputs_of_norms_are_offloaded(words: str) -> None:
    """A norm's input is saved twice where the linear layer recomputes the norm."""
    flags = "--fine-grained-activation-offloading --offload-modules attn_norm mlp_norm --min-offloaded-tensor-size 0"
    layout = Layout.of(words)
    engine = engine_of(tiny_plan(layout, 1, *flags.split()), 0)
    engine.step(list(local_batches(0, layout, 0)), build_schedules(engine.plan).at(0))
    hooks, config = engine.executor.hooks, engine.plan.config
    assert isinstance(hooks, ActivationOffload)
    norm = 8 * config.data.seq_length * config.training.micro_batch_size * config.model.hidden_size
    assert hooks.buffers.num_bytes >= 4 * 2 * norm
