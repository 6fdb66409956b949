"""The files of distillation as Megatron-LM spells them, and what is wrong with one."""

from pathlib import Path

import pytest

from megatrain.config import ConfigError
from megatrain.config.derive.distillation import parse_pair, settings_of_file, teacher_settings
from megatrain.config.model_spec.distillation import LayerPair

RECORDED = """
intermediate_layer_pairs: [["decoder.final_layernorm", "decoder.final_layernorm"], ["decoder.layers.1", "decoder.layers.7", "mse"]]
logit_layers: ["output_layer", "output_layer"]
skip_lm_loss: true
kd_loss_scale: 10.0
"""


def test_a_file_of_megatron_gives_settings(tmp_path: Path) -> None:
    (file := tmp_path / "kd.yaml").write_text(f"{RECORDED}logit_kl_temperature: 2\nlogit_kl_reverse: true\n")
    assert settings_of_file(str(file)) == {
        "distillation.kd_layer_pairs": ["final:final:cosine", "1:7:mse"],
        "distillation.kd_skip_lm_loss": True,
        "distillation.kd_loss_scale": 10.0,
        "distillation.kd_temperature": 2.0,
        "distillation.kd_loss": "reverse_kl",
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no keys"), ("a: [", "kd.yaml"), ("nonsense: 1", "nonsense is not a key"),
        ("skip_lm_loss: 1", "true or false"), ("kd_loss_scale: true", "a number"),
        ('logit_layers: ["a", "b"]', "output_layer"), ("intermediate_layer_pairs: 3", "a list of pairs"),
        ('intermediate_layer_pairs: [["decoder.layers.1"]]', "pairs such as"),
        ('intermediate_layer_pairs: [["decoder.layers.1", "decoder.layers.1", "l1"]]', "pairs such as"),
        ('intermediate_layer_pairs: [["decoder.layers.0.input_layernorm", "decoder.layers.1"]]', "the output of layer N"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, named: str) -> None:
    (file := tmp_path / "kd.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings_of_file(str(file))
    (problem,) = caught.value.problems
    assert named in f"{problem.text} {problem.fix}"
    assert "--export-kd-cfg" in problem.text


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        settings_of_file("nowhere.yaml")


def test_a_description_of_nemo_gives_the_settings_that_megatrain_has(tmp_path: Path) -> None:
    (file := tmp_path / "model_config.yaml").write_text(
        "num_layers: 4\nlayernorm_epsilon: 1.0e-6\nrotary_percentage: 0.5\nactivation: swiglu\nnative_amp_init_scale: 4\n"
    )
    assert teacher_settings(str(file)) == {"num_layers": 4, "norm_epsilon": 1e-6, "rotary_percent": 0.5}


@pytest.mark.parametrize("loss", ["cosine", "mse"])
def test_a_pair_is_read_as_it_is_shown(loss: str) -> None:
    for pair in (LayerPair(3, 7, loss), LayerPair(None, 0, loss), LayerPair(None, None, loss)):  # type: ignore[arg-type]
        assert parse_pair(str(pair)) == pair
