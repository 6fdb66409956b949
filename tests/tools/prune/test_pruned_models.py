"""Pruned models: zero parts are the ones removed and change nothing, and importance is that of hooks in transformers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_models import MODELS, VOCAB, write
from torch import Tensor, nn

from megatrain.checkpoint.reader import CheckpointReader
from megatrain.config.errors import ConfigError
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.inference.stored_model import ModelOptions, build_stored_model
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.tools.calibration_set import read_samples
from megatrain.tools.compare_logits import logits_of_heads
from megatrain.tools.main import main
from megatrain.tools.prune import measure
from megatrain.tools.prune.importance import ENERGY
from megatrain.tools.prune.measure import Calibration, measured
from megatrain.tools.prune.sizes import Source

SAMPLES, LENGTH = 6, 16
WIDE = ModelOptions(device=torch.device("cpu"), dtype=torch.float64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A calibration set of 1,000 tokens."""
    prefix = str(tmp_path_factory.mktemp("data") / "text")
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([np.random.default_rng(0).integers(0, VOCAB, 1000)])
    return prefix


def model_of(name: str, **settings: Any) -> Any:
    """Return a tiny model of transformers in fp64, all of whose weights differ."""
    import transformers

    kind, given = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**given | settings)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, kind)(config).eval().double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def prune(model: Any, data: str, folder: Path, flags: str) -> Path:
    """Return the folder of the pruned checkpoint of a model of transformers."""
    source = write(model, folder / "source")
    words = f"prune --load hf:{source} --save {folder}/pruned --data-path {data} --dtype fp64 --device cpu {flags}"
    assert main([*words.split(), "--samples", str(SAMPLES), "--seq-length", str(LENGTH)]) == 0
    return folder / "pruned"


def logits(folder: Path) -> Tensor:
    """Return our logits in fp64, of a folder of transformers or of the checkpoint of a pruned model."""
    tokens = torch.arange(LENGTH)[None] * 7 % VOCAB
    is_ours = (folder / "iter_0000000").exists()
    reader = CheckpointReader(folder / "iter_0000000") if is_ours else HfCheckpoint(folder)
    (found,) = logits_of_heads(build_stored_model(reader, WIDE, vocab_size=VOCAB), tokens)
    reader.close()
    return found


@torch.no_grad()
def zero(*weights: Tensor) -> None:
    for weight in weights:
        weight.zero_()


def assert_same_function(pruned: Path) -> None:
    before, after = logits(pruned.with_name("source")), logits(pruned)
    assert float((after - before).abs().max()) < 1e-12 * float(before.abs().max())


def test_zero_parts_are_removed_without_effect(data: str, tmp_path: Path) -> None:
    """The identity of a layer, neurons and query groups without output, and channels that are 0 everywhere."""
    model = model_of("Qwen3", rms_norm_eps=1e-30)
    layers, channels = model.model.layers, [3, 4, 30, 31]
    zero(layers[1].self_attn.o_proj.weight, layers[1].mlp.down_proj.weight)
    zero(model.model.embed_tokens.weight.T[3:5], model.model.embed_tokens.weight.T[30:])
    for number, layer in enumerate(layers):
        attention, mlp, group = layer.self_attn, layer.mlp, number % 2 * 16
        zero(mlp.gate_proj.weight[number : number + 4], attention.v_proj.weight[group : group + 16])
        for module in (mlp.down_proj, attention.o_proj):
            for channel in channels:
                zero(module.weight[channel])
    flags = (
        "--num-layers 3 --ffn-hidden-size 76 --num-attention-heads 2 --num-query-groups 1 --hidden-size 28"
    )
    pruned = prune(model, data, tmp_path, flags)
    assert_same_function(pruned)
    with CheckpointReader(pruned / "iter_0000000") as reader:
        assert "decoder.layers.2.mlp.down.weight" in reader.manifest.tensors
        assert "decoder.layers.3.mlp.down.weight" not in reader.manifest.tensors


def test_experts_without_tokens_and_heads_of_latents_are_removed_without_effect(
    data: str, tmp_path: Path
) -> None:
    model = model_of("DeepSeek-V3")
    for layer in model.model.layers:
        mlp = layer.mlp
        zero(layer.self_attn.kv_b_proj.weight.unflatten(0, (4, -1))[1, 12:])
        if not hasattr(mlp, "gate"):  # the first layer is dense
            zero(mlp.down_proj.weight[:, :8], mlp.gate_proj.weight[:8])
            continue
        mlp.gate.e_score_correction_bias.view(6, 4)[:, 2] = -1e3
        zero(mlp.shared_experts.gate_proj.weight[5:9])
        zero(mlp.experts.gate_up_proj[:, 10:18] if hasattr(mlp.experts, "gate_up_proj") else mlp.experts)
    flags = "--num-experts 18 --num-attention-heads 3 --ffn-hidden-size 72 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 20"
    assert_same_function(prune(model, data, tmp_path, flags))


def samples_of(data: str, source: HfCheckpoint) -> Tensor:
    sizes = {"count": SAMPLES, "length": LENGTH + 1, "vocab_size": VOCAB}
    return read_samples(data, source, flag="--data-path", remedy="", **sizes)


@pytest.mark.parametrize("name", ["Qwen3", "Pythia", "Qwen2-MoE"])
def test_importance_is_that_of_hooks_in_transformers(name: str, data: str, tmp_path: Path) -> None:
    model = model_of(name)
    source = HfCheckpoint(write(model, tmp_path / "source"))
    samples = samples_of(data, source)
    calibration = Calibration(samples=samples, by_loss=False, device=WIDE.device, dtype=WIDE.dtype)
    ours = measured(Source.of(source), source, calibration, tmp_path)
    theirs = sums_of_hooks(model, samples[:, :-1])
    assert theirs.keys() == ours.keys() - {ENERGY}
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6, msg=key)


@torch.no_grad()
def sums_of_hooks(model: Any, samples: Tensor) -> dict[str, Tensor]:
    """Return what hooks on the modules of transformers record, by our names."""
    inner = model.base_model
    found: dict[str, Tensor] = {"model.num_layers": torch.zeros(len(inner.layers), dtype=torch.float64)}

    def add(name: str, values: Tensor) -> None:
        found[name] = found.get(name, 0) + values.abs().mean(tuple(range(values.dim() - 1))).square()

    def of_layer(number: int, given: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        cosine = (given[0] * out).sum(-1) / given[0].norm(dim=-1) / out.norm(dim=-1)
        found["model.num_layers"][number] += (1 - cosine).mean()

    def of_experts(number: int, module: Any, given: Any) -> None:
        x, chosen, _ = given
        num_experts, rows = len(module.gate_up_proj), []
        for expert, weight in enumerate(module.gate_up_proj):
            gate, up = (x[(chosen == expert).any(1)] @ weight.T).chunk(2, dim=-1)
            rows.append((nn.functional.silu(gate) * up).abs().sum(0) / chosen.numel())
        for key, value in (
            ("num_experts", torch.bincount(chosen.flatten(), minlength=num_experts) / chosen.numel()),
            ("moe_ffn_hidden_size", torch.stack(rows).square()),
        ):
            key = f"{number}.experts.{key}"
            found[key] = found.get(key, 0) + value.double()

    for number, layer in enumerate(inner.layers):
        layer.register_forward_hook(lambda _, given, out, number=number: of_layer(number, given, out))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).register_forward_hook(lambda _, __, out: add("model.hidden_size", out))
        modules = dict(layer.named_modules())
        for label, path in READ_BY.items():
            if label not in modules:
                continue
            heads = 4 if path == "model.num_attention_heads" else None
            modules[label].register_forward_pre_hook(
                lambda _, given, key=f"{number}.{path}", heads=heads: add(
                    key, given[0] if heads is None else given[0].unflatten(-1, (heads, -1)).norm(dim=-1)
                )
            )
        if "mlp.experts" in modules:
            modules["mlp.experts"].register_forward_pre_hook(partial(of_experts, number))
    for sample in samples:
        model(sample[None], use_cache=False)
    return found


READ_BY = {
    "self_attn.o_proj": "model.num_attention_heads",
    "attention.dense": "model.num_attention_heads",
    "mlp.down_proj": "model.ffn_hidden_size",
    "mlp.dense_4h_to_h": "model.ffn_hidden_size",
    "mlp.shared_expert.down_proj": "experts.moe_shared_expert_intermediate_size",
}
"""Modules of transformers and the parts that they read."""


def test_a_stopped_command_continues_and_one_layer_at_a_time_measures_the_same(
    data: str, tmp_path: Path
) -> None:
    source = HfCheckpoint(write(model_of("Qwen2-MoE"), tmp_path / "source"))
    samples = samples_of(data, source)
    calibration = Calibration(samples=samples, by_loss=False, device=WIDE.device, dtype=WIDE.dtype)

    def sums(name: str) -> dict[str, Tensor]:
        (tmp_path / name).mkdir(exist_ok=True)
        return dict(measured(Source.of(source), source, calibration, tmp_path / name))

    whole = sums("whole")
    stream = (LENGTH + 1) * 32 * 8
    with mock.patch.object(measure, "available_bytes", return_value=4 * 2 * stream):  # two samples at a time
        with mock.patch.object(measure, "_write", stopping_after(2)), pytest.raises(KeyboardInterrupt):
            sums("layers")
        with mock.patch.object(measure._Passes, "run", counting(runs := [])):
            layers = sums("layers")
    assert runs == [2]  # the other two parts were measured before it was stopped
    assert layers.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(layers[name], value, rtol=1e-12, atol=1e-14)
    other = dataclasses.replace(calibration, by_loss=True)
    with pytest.raises(ConfigError, match="another source, calibration set or --layer-importance"):
        measured(Source.of(source), source, other, tmp_path / "layers")


def stopping_after(count: int) -> Any:
    """Return `measure._write`, which ends the command after so many calls."""
    write_sums, calls = measure._write, itertools.count(1)

    def write(*arguments: Any) -> None:
        write_sums(*arguments)
        if next(calls) == count:
            raise KeyboardInterrupt

    return write


def counting(sizes: list[int]) -> Any:
    """Return `_Passes.run`, which notes the number of its samples."""
    run = measure._Passes.run

    def noted(self: Any, samples: Tensor) -> Iterator[float]:
        sizes.append(len(samples))
        return run(self, samples)

    return noted


def test_layers_are_scored_by_the_loss_without_them(data: str, tmp_path: Path) -> None:
    """The score is the loss of the checkpoint from which that layer is pruned."""
    model = model_of("Qwen3")
    source = HfCheckpoint(write(model, tmp_path / "source"))
    samples = samples_of(data, source)
    calibration = Calibration(samples=samples, by_loss=True, device=WIDE.device, dtype=WIDE.dtype)
    found = measured(Source.of(source), source, calibration, tmp_path)["model.num_layers"] / SAMPLES
    layers = model.model.layers
    for number, loss in enumerate(found):
        model.model.layers = nn.ModuleList([layer for place, layer in enumerate(layers) if place != number])
        with torch.no_grad():
            output = model(samples[:, :-1], use_cache=False).logits
        expected = nn.functional.cross_entropy(output.flatten(0, 1), samples[:, 1:].flatten())
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
