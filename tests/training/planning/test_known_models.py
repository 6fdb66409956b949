"""The files of configs/models/: each resolves at its number of GPUs, and its model has as many parameters as the original."""

from pathlib import Path

import pytest
import torch
from everyday import only

from megatrain.config import Facts, Plan, parse, resolve
from megatrain.config.subjects.model_spec import describe_model
from megatrain.model.gpt import build_model
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.rank_lists import GridShape
from megatrain.training.planning.model_tree import model_tree

FOLDER = Path(__file__).parents[3] / "configs" / "models"
ORIGINALS = {  # GPUs, and the parameters of the checkpoint on Hugging Face, or those that the paper's shapes give
    "gpt2_124m": (8, 124_439_808),
    "gpt3_175b": (1024, 174_604_259_328),
    "llama3_8b": (256, 8_030_261_248),
    "llama3_70b": (2048, 70_553_706_496),
    "llama3_405b": (16384, 405_853_388_800),
    "mixtral_8x7b": (64, 46_702_792_704),
    "mixtral_8x22b": (256, 140_620_634_112),
    "deepseek_v2_lite": (64, 15_706_484_224),
    "deepseek_v3": (
        2048,
        671_026_404_352 + 11_610_067_968,
    ),  # and multi-token prediction; biases of experts are no parameters
    "gpt_oss_20b": (64, 20_914_757_184),
    "gpt_oss_120b": (256, 116_829_156_672),
    "olmo2_7b": (256, 7_298_617_344),
    "llava15_7b_projector": (8, 7_063_427_072 - 12_596_224 - 2_048),  # the tower's last layer and norm
    "llava15_7b": (8, 7_063_427_072 - 12_596_224 - 2_048),
    "qwen3_0_6b": (8, 596_049_920),
    "qwen3_8b": (64, 8_190_735_360),
    "qwen3_30b_a3b": (64, 30_532_122_624),
    "qwen3_235b_a22b": (512, 235_093_634_560),
    "nemotron_h_8b": (256, 8_100_852_736),
    "nemotron_3_nano_30b_a3b": (256, 31_577_937_344),
}

EVERYDAY = (
    *("gpt2_124m", "llama3_8b", "deepseek_v2_lite", "gpt_oss_20b", "olmo2_7b", "llava15_7b", "qwen3_0_6b"),
    "nemotron_h_8b",
)
"""A small model of each family: thousands of experts take seconds."""


def plan_of(name: str) -> Plan:
    facts = Facts(
        world_size=ORIGINALS[name][0],
        device="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        device_capability=(9, 0),
        libraries={"torch": "2.11.0"},
    )
    return resolve(parse(["--config", str(FOLDER / f"{name}.yaml"), "--save", "/nowhere"]), facts)


def test_every_file_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(ORIGINALS)


@pytest.mark.parametrize("name", only(EVERYDAY, ORIGINALS))
def test_a_model_has_as_many_parameters_as_the_original(name: str) -> None:
    config = plan_of(name).config
    assert config.tokenizer.vocab_size is not None
    spec = describe_model(config.model, config.experts, config.vision, vocab_size=config.tokenizer.vocab_size)
    model = build_model(
        spec,
        build_grid(GridShape(), 0),
        seq_length=config.data.seq_length,
        sequence_parallel=False,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
    )
    assert model_tree([model.registry], spec.routers_by_name).parameters == ORIGINALS[name][1]
