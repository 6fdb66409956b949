"""Runs that take settings and weights from a folder of transformers: --from-hf, hf:FOLDER."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatrain.config import ConfigError, Plan, parse, render_plan, resolve
from megatrain.config.environment import read_environment
from megatrain.config.errors import MegatrainError
from megatrain.training.launch.facts import gather_facts
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 32, "rms_norm_eps": 1e-05, "rope_theta": 5000.0, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens": (40, 16), "lm_head": (40, 16), "model.norm": (16,),
    **{f"model.layers.0.self_attn.{x}_proj": (16, 16) for x in "qkvo"},
    **{f"model.layers.0.{name}": (16,) for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"model.layers.0.mlp.{x}_proj": (24, 16) for x in ("gate", "up")}, "model.layers.0.mlp.down_proj": (16, 24),
}  # fmt: skip
RUN = "--seq-length 16 --mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "theirs"
    path.mkdir()
    torch.manual_seed(0)
    save_file(
        {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint", "--export-kd-teacher-load"])
def test_a_folder_that_is_no_checkpoint_is_answered_with_what_reads_it(folder: Path, flag: str) -> None:
    flags = f"--from-hf {folder}"
    with pytest.raises(MegatrainError, match=f"fix: give {flag} hf:{folder}, "):
        plan(f"{flags} {flag} {folder}")
    plan(f"{flags} {flag} hf:{folder}")
    adapters = folder.parent / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(MegatrainError, match=f"convert peft-to-megatrain {adapters} TARGET"):
        plan(f"{flags} {flag} {adapters}")


def plan(flags: str) -> Plan:
    request = parse([*RUN.split(), *flags.split()])
    return resolve(request, gather_facts(request, read_environment({})))


def test_the_plan_has_the_settings_of_a_config_json_with_their_source(folder: Path) -> None:
    found = plan(f"--from-hf {folder} --rotary-base 777")
    wanted = {
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.swiglu": True,
        "tokenizer.vocab_size": 40,
    }
    for path, value in wanted.items():
        assert (found.config.get(path), str(found.origins[path])) == (value, f"folder: {folder}/config.json")
    assert found.config.model.rotary_base == 777
    assert f"given by {folder}/config.json (--from-hf)" in render_plan(found)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--from-hf {0}/none", "none: has no config.json"),
        ("--load hf:{0}/none --from-hf {0}", "none: has no config.json"),
        ("--load hf:{0} --from-hf {0} --num-layers 2", "--num-layers cannot differ"),
        ("--load hf:{0} --from-hf {0} --tokenizer-type NullTokenizer --vocab-size 41", "40 rows, and the tokenizer 41"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_folder_is_refused(folder: Path, flags: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan(flags.format(folder))


def test_a_run_starts_with_the_first_rows_and_resumes_without_the_weights(folder: Path) -> None:
    run = folder.parent / "run"
    flags = f"{RUN} --from-hf {folder} --pretrained-checkpoint hf:{folder} --load {run} --save {run} --vocab-size 33"

    def trained(more: str) -> Trainer:
        with joined_ranks(parse(f"{flags} {more}".split()), Phases(Console(is_quiet=True))) as ranks:
            trainer = Trainer(ranks)
            trainer.resume()
            assert trainer.train() == 0
        return trainer

    assert trained("").progress.iteration == 1
    (folder / "model.safetensors").unlink()
    assert trained("--train-iters 2 --override-opt-param-scheduler").progress.iteration == 2
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="has no weights"):
        trained("")
