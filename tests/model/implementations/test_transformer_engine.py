"""The leaves of Transformer Engine, with a stand-in for the library: names, layouts, destinations of gradients."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from split_schedules import one_rank, with_split_backward
from torch import Tensor
from transformer_engine_stand_in import SIGNATURES, stand_in

import pretrain
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.latent_attention import LatentSizes
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.model import ModelSpec, MtpSpec
from megatrain.config.model_spec.norm import NormSpec
from megatrain.config.model_spec.rotary import RotarySpec
from megatrain.config.model_spec.stack import Stack
from megatrain.model.gpt import Model, build_model
from megatrain.optim.sharded import fill_weights
from megatrain.parallel.allocate_buffers import allocate_buffers
from megatrain.parallel.batch import Batch, PassInfo
from megatrain.parallel.batches_ahead import with_batches_ahead
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.data_parallel import DataParallel
from megatrain.parallel.initialize import InitialWeights
from megatrain.parallel.pipeline.executor import Executor
from megatrain.parallel.rank_lists import GridShape

VOCAB, SEQ, BATCH, PASSES = 101, 12, 2, 3
CPU = torch.device("cpu")
_ATTENTION = {"num_heads": 4, "num_query_groups": 2, "head_dim": 8, "rotary": RotarySpec(base=10000.0)}


def _of_latents(query_rank: int | None, **options: Any) -> AttentionSpec:
    sizes = LatentSizes(
        query_rank=query_rank, kv_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7
    )
    return AttentionSpec(
        num_heads=4, num_query_groups=4, head_dim=10, latent=sizes,
        rotary=RotarySpec(base=10000.0, is_interleaved=True), **options,
    )  # fmt: skip


def spec_of(attention: AttentionSpec, mlp: MlpSpec, *, position: str = "pre", **norm: object) -> ModelSpec:
    layer = LayerSpec(parts=(attention, mlp), norm_position=position)  # type: ignore[arg-type]
    return ModelSpec(
        hidden_size=16, vocab_size=VOCAB, padded_vocab_size=128, stacks=(Stack(layers=(layer,) * 2),), is_tied=True, init_std=0.2,
        output_init_std=0.1, norm=NormSpec(**norm), hidden_dropout=0.1,  # type: ignore[arg-type]
    )  # fmt: skip


SPECS = {
    "llama": spec_of(AttentionSpec(**_ATTENTION), MlpSpec(ffn_hidden_size=24)),
    "gpt2": spec_of(
        AttentionSpec(**_ATTENTION, has_bias=True, has_qkv_bias=True),
        MlpSpec(ffn_hidden_size=24, activation="gelu_tanh", has_bias=True),
        kind="LayerNorm",
    ),
    "post": spec_of(
        AttentionSpec(**_ATTENTION, qk_norm="head", window=3, scale=0.3),
        MlpSpec(ffn_hidden_size=24, activation="geglu_tanh"),
        position="post",
        is_stored_minus_one=True,
    ),
    "both": spec_of(
        AttentionSpec(**_ATTENTION, qk_norm="head", has_qkv_bias=True),
        MlpSpec(ffn_hidden_size=24, activation="squared_relu"),
        position="both",
        kind="LayerNorm",
        is_stored_minus_one=True,
    ),
    "latents": spec_of(_of_latents(6, qk_norm="latent"), MlpSpec(ffn_hidden_size=24)),
    "latents of keys": spec_of(_of_latents(None), MlpSpec(ffn_hidden_size=24)),
    "quick": spec_of(AttentionSpec(**_ATTENTION), MlpSpec(ffn_hidden_size=24, activation="quick_geglu")),
}
SPECS["ahead"] = dataclasses.replace(SPECS["llama"], mtp=MtpSpec(num_depths=1, loss_factor=0.3))


@pytest.fixture
def library() -> Iterator[ModuleType]:
    with stand_in() as found:
        yield found


def built(spec: ModelSpec, implementation: str) -> Model:
    attention = spec.layers[0].mixer
    assert attention is not None
    is_plain = attention.softcap is None and attention.sink == "none" and not attention.dropout
    return build_model(
        spec, build_grid(GridShape(), 0), seq_length=SEQ, sequence_parallel=False, dtype=torch.float64,
        device=CPU, implementation=implementation,
        attention=implementation if implementation == "transformer_engine" and is_plain else "sdpa",
    )  # fmt: skip


def batches() -> list[Batch]:
    ids = torch.randint(0, VOCAB, (PASSES, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return [
        Batch(
            tokens=one[:, :-1], labels=one[:, 1:], loss_mask=torch.ones(BATCH, SEQ),
            position_ids=torch.arange(SEQ).expand(BATCH, -1),
        )
        for one in ids
    ]  # fmt: skip


def trained(
    spec: ModelSpec, implementation: str, *, splits_backward: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of some micro-batches, and the sums of their gradients by the names of this rank's parameters."""
    grid, model = build_grid(GridShape(), 0), built(spec, implementation)
    buffers = allocate_buffers(
        model.registry, grid=grid, weight_dtype=torch.float64, grad_dtype=torch.float64, device=CPU
    )
    fill_weights(buffers, InitialWeights(3))
    executor = Executor(
        model.segments, grid, hidden_shape=(SEQ, BATCH, spec.hidden_size), dtype=torch.float64, device=CPU,
        hooks=DataParallel(buffers, grid),
    )  # fmt: skip
    actions = one_rank(PASSES)
    infos = [PassInfo(microbatch=number, first_sample=BATCH * number) for number in range(PASSES)]
    ahead = [with_batches_ahead(batch, spec.num_depths) for batch in batches()]
    executor.run(with_split_backward(actions) if splits_backward else actions, ahead, infos)
    assert not any(entry.parameter.grad is not None for entry in model.registry.entries.values()), (
        "a gradient besides the buffer's"
    )
    gradients = {
        name: entry.module.weight_grads[entry.attribute].clone()
        for name, entry in model.registry.entries.items()
    }
    return torch.stack([info.sums["lm_loss"] for info in infos]), gradients


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_losses_and_gradients_are_those_of_local(
    library: ModuleType,
    name: str,
    splits_backward: bool,
) -> None:
    loss, gradients = trained(SPECS[name], "local")
    found_loss, found = trained(SPECS[name], "transformer_engine", splits_backward=splits_backward)
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    assert list(found) == list(gradients)
    for parameter, gradient in gradients.items():
        assert gradient.any(), parameter
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11, msg=parameter)


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_of_local(library: ModuleType, name: str) -> None:
    local, other = (built(SPECS[name], one).registry for one in ("local", "transformer_engine"))
    assert {name: entry.layout for name, entry in other.entries.items()} == {
        name: entry.layout for name, entry in local.entries.items()
    }


def test_evaluation_needs_no_gradients(library: ModuleType) -> None:
    losses = []
    for implementation in ("local", "transformer_engine"):
        grid, model = build_grid(GridShape(), 0), built(SPECS["gpt2"], implementation)
        buffers = allocate_buffers(model.registry, grid=grid, weight_dtype=torch.float64, device=CPU)
        fill_weights(buffers, InitialWeights(3))
        hidden, info = None, PassInfo(is_training=False)
        with torch.no_grad():
            for segment in model.segments:
                hidden = segment(hidden, batches()[0], info)
        losses.append(info.sums["lm_loss"])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


def test_a_renamed_argument_is_found(library: ModuleType) -> None:
    renamed = {**SIGNATURES, "LayerNormLinear": SIGNATURES["LayerNormLinear"].replace(" eps", " epsilon")}
    with (
        mock.patch.dict(SIGNATURES, renamed),
        pytest.raises(TypeError, match="LayerNormLinear has no argument eps"),
    ):
        built(SPECS["llama"], "transformer_engine")


@pytest.mark.parametrize(
    ("attention", "mlp", "leaf"),
    [
        ({"softcap": 20.0}, {}, "LocalContextAttention"),
        ({"sink": "zero"}, {}, "LocalContextAttention"),
        ({"dropout": 0.1}, {}, "LocalContextAttention"),
        ({"qk_norm": "all_heads"}, {}, "LocalSplitRmsNorm"),
        ({}, {"activation": "gelu"}, "LocalRowLinear"),
        ({}, {"clamp": 7.0}, "LocalRowLinear"),
        ({}, {"offset": 1.0}, "LocalRowLinear"),
    ],
)
def test_local_supplies_a_leaf_that_the_library_lacks(
    library: ModuleType,
    attention: dict[str, object],
    mlp: dict[str, object],
    leaf: str,
) -> None:
    spec = spec_of(
        AttentionSpec(**{**_ATTENTION, **attention}),  # type: ignore[arg-type]
        MlpSpec(**{"ffn_hidden_size": 24, **mlp}),  # type: ignore[arg-type]
    )
    loss, gradients = trained(spec, "local")
    found_loss, found = trained(spec, "transformer_engine")
    torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-11, msg=parameter)
    names = {type(module).__name__ for module in built(spec, "transformer_engine").segments[1].modules()}
    assert leaf in names
    assert {name for name in names if name.startswith("TE")}, "all other leaves are the library's"


def test_a_library_that_cannot_be_imported_is_reported_with_a_fix() -> None:
    with (
        mock.patch.dict(sys.modules, {"transformer_engine.pytorch": None}),
        pytest.raises(ConfigError, match=r"--transformer-impl transformer_engine: .*\n  fix: install"),
    ):
        built(SPECS["llama"], "transformer_engine")


def test_a_plan_does_not_import_the_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        "--dry-run --world-size 4 --transformer-impl transformer_engine --bf16 --tensor-model-parallel-size 2"
        " --sequence-parallel --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data"
        " --tokenizer-type NullTokenizer --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --swiglu"
        " --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --print-config full"
    )
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    assert pretrain.main(flags.split()) == 0
    assert "transformer_engine" not in sys.modules
    assert re.search(r"memory plan\s.*--transformer-impl\s+local", capsys.readouterr().out, re.DOTALL)
