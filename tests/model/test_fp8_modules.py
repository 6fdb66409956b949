"""--te-precision-config-file: its recipes reach the linear layers of every model, and others keep no history."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformer_engine_stand_in import stand_in

from megatrain.config import ConfigError, Plan, parse, resolve
from megatrain.config.environment import read_environment
from megatrain.config.module_precision import linear_layers
from megatrain.config.subjects.fp8 import fp8_recipes
from megatrain.model.gpt import Model
from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.fp8.scaling import Fp8Recipe, Fp8Recipes
from megatrain.parallel.rank_lists import GridShape
from megatrain.tools.parity.features import FP8_MODULES
from megatrain.tools.parity.measure import tiny_plan
from megatrain.tools.parity.models import MODELS
from megatrain.tools.parity.rows import Layout
from megatrain.training.build import build_model_from_plan
from megatrain.training.launch.facts import gather_facts


def build(plan: Plan) -> Model:
    return build_model_from_plan(plan, build_grid(GridShape(), 0), torch.device("cpu"))


@pytest.mark.parametrize(
    "words",
    [
        *(name for name in MODELS if not name.startswith(("t5", "llava", "projector"))),
        "mixtral mtp1",
        "deepseek",
        "latentexperts gpt2",
    ],
)  # the file names the third layer, and the stacks of T5 have two; models with frozen parts are not in FP8
def test_the_names_that_the_file_may_have_are_those_of_the_model(words: str) -> None:
    plan = tiny_plan(Layout.of(f"{words} fp8modules"), 1)
    asked = set()
    recipe = Fp8Recipes.recipe

    def noting(self: Fp8Recipes, layer: int, name: str) -> Fp8Recipe | None:
        asked.add((layer, name.replace(".experts.0.", ".experts.")))
        return recipe(self, layer, name)

    with mock.patch.object(Fp8Recipes, "recipe", noting):
        build(plan)
    assert asked == {(one.layer, one.weight) for one in linear_layers(plan.derived.model_spec)}


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_only_linear_layers_with_delayed_scales_have_a_history(implementation: str) -> None:
    """Layer 0 and attention 3 are delayed but for the output projection; MLPs 1 and 3 have another recipe, and layer 2 too."""
    plan = tiny_plan(Layout.of("fp8modules"), 1)
    values = {"transformer_impl": implementation, "attention_backend": "math"}
    plan = dataclasses.replace(plan, derived=plan.derived.replaced(values))
    with stand_in():
        model = build(plan)
    assert model.fp8 is not None
    weights = [name for name in model.fp8.history.names if name.endswith(".weight")]
    layers = {
        0: ("attention.q", "mlp.gate", "mlp.down"),
        1: ("attention.q",),
        3: ("attention.q",),
    }
    assert sorted(weights) == sorted(
        f"decoder.layers.{number}.{name}.weight" for number, names in layers.items() for name in names
    )


RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-3 --micro-batch-size 2 --mock-data"
    " --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 100 --position-embedding-type rope --fp8-format e4m3"
    " --te-precision-config-file"
)


def test_a_run_reads_the_file(tmp_path: Path) -> None:
    file = tmp_path / "modules.yaml"
    file.write_text(FP8_MODULES)
    request = parse([*RUN.split(), str(file)])
    plan = resolve(request, gather_facts(request, read_environment()))
    assert {recipe.name for recipe in fp8_recipes(plan)} == {"delayed", "tensorwise", "blockwise"}


@pytest.mark.parametrize("content", [None, b"\xff", b"configs: {}", b"{"])
def test_a_file_that_cannot_be_used_is_a_problem(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "modules.yaml"
    if content is not None:
        file.write_bytes(content)
    request = parse([*RUN.split(), str(file)])
    with pytest.raises(
        ConfigError, match=rf"^--te-precision-config-file {file}: [\s\S]*fix: correct the file"
    ):
        resolve(request, gather_facts(request, read_environment()))
