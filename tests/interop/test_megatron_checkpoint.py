"""Checkpoints of Megatron-LM: names, padding, master weights, and files that are damaged or hostile.

torch's own distributed checkpoint writes the files, under Megatron-LM's names.
"""

import argparse
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_weights import check_damage
from everyday import one_in
from megatron_folders import ARGUMENTS, SHAPES, weights, write

import pretrain
from megatrain.checkpoint.errors import CheckpointError, DamagedError, MismatchError
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint
from megatrain.interop.megatron.inert_pickle import path_of, read_pickle
from megatrain.interop.megatron.names import FusedRows, parts_of
from megatrain.interop.megatron.torch_dist import METADATA_NAME, TorchDistFolder
from megatrain.tools.main import main


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("megatron"), weights())


def box(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in sizes)


def test_fused_and_stacked_parameters_have_canonical_parts() -> None:
    fused = FusedRows(num_heads=4, num_query_groups=2, is_gated=True)
    found = {
        part.name: part
        for part in parts_of("decoder.layers.self_attention.linear_qkv.weight", (3, 16, 8), fused)
    }
    key = found["decoder.layers.1.attention.k.weight"]
    assert (key.shape, key.place, key.rows) == ((4, 8), (1,), (slice(4, 6), slice(12, 14)))
    expert = list(parts_of("decoder.layers.2.mlp.experts.experts.linear_fc1.weight", (5, 6, 8), fused))
    assert [part.name for part in expert[:2]] == [
        "decoder.layers.2.mlp.experts.0.gate.weight",
        "decoder.layers.2.mlp.experts.0.up.weight",
    ]
    assert (expert[-1].place, expert[-1].rows) == ((4,), (slice(3, 6),))
    for theirs, shape, ours in (
        ("fc1_latent_proj.weight", (4, 8), "latent_down.weight"),
        ("fc2_latent_proj.bias", (8,), "latent_up.bias"),
        ("shared_experts.gate_weight", (1, 8), "shared_gate.weight"),
        ("router.bias", (5,), "router.bias"),
    ):
        (part,) = parts_of(f"decoder.layers.2.mlp.{theirs}", shape, fused)
        assert (part.name, part.shape) == (f"decoder.layers.2.mlp.{ours}", shape)
    norm = next(parts_of("decoder.layers.mlp.linear_fc1.layer_norm_weight", (3, 8), fused))
    assert norm.name == "decoder.layers.0.mlp.norm.weight"


def test_a_reader_has_master_weights_and_moments_without_padding(stored: Path) -> None:
    reader, expected = MegatronCheckpoint(stored), weights()
    manifest = reader.manifest
    assert (manifest.iteration, manifest.consumed_train_samples, manifest.optimizer_step_count) == (3, 6, 3)
    assert manifest.tensors["output_layer.weight"].shape == (30, 8)
    for kind, prefix in (("weight", "fp32_param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        out = reader.values("decoder.layers.1.attention.k.weight", (8, 8), ((3, 6), (1, 6)), kind=kind)
        qkv = expected[f"optimizer.state.{prefix}.decoder.layers.self_attention.linear_qkv.weight"][1]
        keys = torch.cat([qkv[4:8], qkv[16:20]])  # each head has 4 queries, 4 keys, 4 values
        assert torch.equal(out, keys[3:6, 1:6])


def test_settings_come_from_the_arguments(stored: Path) -> None:
    config = MegatronCheckpoint(stored).plan.config
    assert config.model.disable_bias_linear
    assert config.model.swiglu
    assert config.precision.bf16
    assert config.training.global_batch_size == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"moe_apply_probs_on_input": True}, "its arguments: "),
        ({"padded_vocab_size": None}, "no padded_vocab_size"),
        ({"num_attention_heads": 3}, "its arguments: "),
    ],
)
def test_models_without_an_equal_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(MismatchError, match=problem):
        MegatronCheckpoint(write(tmp_path, weights(), **changes))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("decoder.layers.self_attention.linear_strange.weight", "has no counterpart"),
    ],
)
def test_tensors_without_an_equal_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(MismatchError, match=problem):
        MegatronCheckpoint(write(tmp_path, {**weights(), name: torch.zeros(2, 8)}))


class Attack:
    """Creates a file when a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    marker = tmp_path / "attacked"
    common = {"iteration": 3, "args": argparse.Namespace(**ARGUMENTS), "more": Attack(marker)}
    path = write(tmp_path, weights(), common)
    assert not marker.exists()
    assert MegatronCheckpoint(path).manifest.iteration == 3
    (path / METADATA_NAME).write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(DamagedError):
        MegatronCheckpoint(path)
    record = read_pickle(pickle.dumps(Attack(marker)))
    assert path_of(record).endswith(".touch")
    assert not marker.exists()


def test_a_place_outside_of_the_folder_is_refused(stored: Path, tmp_path: Path) -> None:
    copy = tmp_path / stored.name
    shutil.copytree(stored, copy)
    data = (copy / METADATA_NAME).read_bytes()
    assert b"__0_0.distcp" in data
    (copy / METADATA_NAME).write_bytes(data.replace(b"__0_0.distcp", b"../../../etc"))
    with pytest.raises(DamagedError, match="not a place"):
        TorchDistFolder(copy)


@pytest.mark.parametrize("num_faults", one_in(2, [60, 600]))
def test_damage_is_found_or_harmless(stored: Path, tmp_path: Path, num_faults: int) -> None:
    files = [METADATA_NAME, "__0_0.distcp", "__0_0.distcp"]
    check_damage(stored, tmp_path / "copy", MegatronCheckpoint, files, CheckpointError, num_faults=num_faults)


def test_the_command_writes_a_checkpoint_and_says_how_to_continue(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "megatron-to-megatrain", str(stored.parent), str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "2 rows of padding are left out" in text
    assert "--vocab-size 30" in text
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert main(["convert", "megatron-to-megatrain", str(stored.parent), str(tmp_path / "run")]) == 2
    assert "is a checkpoint" in capsys.readouterr().err


def test_optimizer_state_by_buckets_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights alone can be loaded; a run that continues the optimizer gets an error."""
    bare = {name: tensor for name, tensor in weights().items() if not name.startswith("optimizer.")}
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    path = write(tmp_path, {**bare, bucket: torch.zeros(64)})
    remedy = "--dist-ckpt-optim-fully-reshardable"
    assert main(["convert", "megatron-to-megatrain", str(tmp_path), str(tmp_path / "ours")]) == 2
    assert remedy in capsys.readouterr().err
    manifest = MegatronCheckpoint(path).manifest
    assert not manifest.state["has_optimizer"]
    assert {frozenset(tensor.kinds) for tensor in manifest.tensors.values()} == {frozenset({"weight"})}
    run = (
        f"--use-checkpoint-args --load {tmp_path} --mock-data --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --bf16"
        " --train-iters 4 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --device cpu"
    ).split()
    assert pretrain.main(run) == 2
    assert remedy in capsys.readouterr().err
    assert pretrain.main([*run, "--no-load-optim"]) == 0
    assert pretrain.main([*run, "--finetune"]) == 0


def test_master_weights_and_padding_come_back(stored: Path, tmp_path: Path) -> None:
    """bf16 weights of the model are those that its fp32 master weights round to; rows of padding are zero."""
    assert main(["convert", "megatron-to-megatrain", str(stored.parent), str(tmp_path / "ours")]) == 0
    assert main(["convert", "megatrain-to-megatron", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    found, expected = TorchDistFolder(tmp_path / "back" / stored.name), weights()
    assert found.tensors.keys() == {
        name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
            ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
        )
        for name in expected
    }
    for name, shape in SHAPES.items():
        for prefix in (
            "",
            "optimizer.state.fp32_param.",
            "optimizer.state.exp_avg.",
            "optimizer.state.exp_avg_sq.",
        ):
            if "layernorm" in name and "final" not in name:
                continue
            same = found.read(prefix + name, box(*shape))
            tensor = expected[prefix + name].clone()
            if tensor.shape[0] == 32:
                tensor[30:] = 0
            assert same.dtype == tensor.dtype
            assert torch.equal(same, tensor), prefix + name
    assert main(["convert", "megatrain-to-megatron", str(tmp_path / "ours"), str(tmp_path / "back")]) == 2


def test_the_common_state_of_older_versions_is_read(stored: Path, tmp_path: Path) -> None:
    common = {
        "iteration": 3,
        "args": argparse.Namespace(**ARGUMENTS),
        "opt_param_scheduler": {"num_steps": 6},
    }
    path = write(tmp_path, weights(), common)
    data = (path / METADATA_NAME).read_bytes()
    (path / METADATA_NAME).write_bytes(data.replace(b"common_state", b"ignored_name"))
    with pytest.raises(DamagedError, match="has no common_state"):
        MegatronCheckpoint(path)
    torch.save(common, path / "common.pt")
    assert MegatronCheckpoint(path).manifest.consumed_train_samples == 6


def test_commands_for_other_folders_name_the_conversion(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, conversion = stored.parent, "megatrain convert megatron-to-megatrain"
    for words, exit_code in (
        (["convert", "megatrain-to-hf", str(run), str(tmp_path / "out")], 3),
        (["convert", "hf-to-megatrain", str(run), str(tmp_path / "out")], 2),
        (["generate", "--load", f"hf:{run}", "--prompt", "5"], 2),
        (["checkpoint", "verify", str(run)], 3),
        (["checkpoint", "verify", str(stored)], 3),
    ):
        assert main(words) == exit_code
        assert conversion in capsys.readouterr().err
    assert main(["checkpoint", "ls", str(run)]) == 0
    printed = capsys.readouterr().out
    assert conversion in printed
    assert "damaged" not in printed


def test_text_generation_names_the_padding_that_it_leaves_out(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--load", str(stored.parent), "--prompt", "5", "--max-new-tokens", "1"]) == 0
    assert "2 rows of padding are left out" in capsys.readouterr().out


def test_a_folder_without_a_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "megatron-to-megatrain", str(tmp_path), str(tmp_path / "run")]) != 0
    assert "has no checkpoint of Megatron-LM" in capsys.readouterr().err
