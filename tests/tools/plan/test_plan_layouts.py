"""`megatrain plan`: what it prints fits, starts with its flags, and is sorted by time."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from megatrain.config import parse
from megatrain.config.environment import read_environment
from megatrain.tools.main import main
from megatrain.training.planning import dry_run

MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 8000 --global-batch-size 64 --train-iters 10 --bf16"
    " --hidden-dropout 0 --attention-dropout 0"
)
EXPERTS = (
    " --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall"
)


def planned(text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", *text.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", marks=pytest.mark.nightly),
        EXPERTS,
        pytest.param(" --fp8-format hybrid --fp8-recipe tensorwise", marks=pytest.mark.nightly),
    ],
    ids=["dense", "experts", "fp8"],
)
@pytest.mark.nightly
def test_the_layouts_start_with_their_flags_and_have_the_memory_of_a_dry_run(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = 1.2
    found = planned(f"{MODEL}{more} --world-size 16 --gpu H100 --memory-gb {limit} --top 3", capsys)
    times = [one["time"]["total"] for one in found["layouts"]]
    assert times == sorted(times)
    assert len(times) == 3
    for one in found["layouts"]:
        assert one["memory_bytes"] <= limit * 1e9
        flags = f"{MODEL}{more} --micro-batch-size 1 --lr 1e-4 --world-size 16 --dry-run"
        run = dry_run.examine(parse([*flags.split(), *shlex.split(one["flags"])]), read_environment())
        assert max(stage.total for stage in run.memory) == pytest.approx(one["memory_bytes"], rel=0.02)
        assert run.ranks.axes["dp"].size == one["layout"]["dp"]


def test_flags_of_the_command_line_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(f"{MODEL} --world-size 8 --tensor-model-parallel-size 4 --top 2", capsys)
    assert {one["layout"]["tp"] for one in found["layouts"]} == {4}
    assert found["given"]["layout"]["tp"] == 4
    found = planned(f"{MODEL} --world-size 8 --micro-batch-size 2 --lr 1 --top 2", capsys)
    assert {one["layout"]["micro_batch"] for one in found["layouts"]} == {2}
    found = planned(
        f"{MODEL} --world-size 8 --global-batch-size 48 --micro-batch-size 3 --lr 1 --top 1", capsys
    )
    assert found["layouts"][0]["layout"]["micro_batch"] == 3


def test_without_a_layout_the_reasons_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL.split(), *"--world-size 7 --top 1".split()]) == 2
    assert "fits into 81.0 GB a GPU and divides the model, " in capsys.readouterr().err


def test_a_search_lists_the_given_layout_with_faster_ones(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{MODEL} --micro-batch-size 1 --lr 1 --world-size 8 --top 1 --pipeline-model-parallel-size 8"
    (kept,) = planned(flags, capsys)["layouts"]
    assert kept["layout"]["pp"] == 8
    found = planned(f"{flags} --search", capsys)
    (best,) = found["layouts"]
    assert best["layout"]["pp"] == 1
    assert found["given"]["layout"]["pp"] == 8
    assert best["time"]["total"] < found["given"]["time"]["total"]


def test_a_given_layout_that_takes_nearly_all_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{MODEL} --micro-batch-size 1 --lr 1 --world-size 8 --top 1"
    given = planned(flags, capsys)["given"]["memory_bytes"]
    assert main(["plan", *flags.split(), "--memory-gb", str(given / 0.97e9)]) == 0
    assert "as given (takes 97% of the memory: it may not fit)" in capsys.readouterr().out


def test_the_table_names_gpus_and_the_given_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["plan", *MODEL.split(), *"--micro-batch-size 1 --lr 1 --world-size 8 --gpu B200 --top 1".split()]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "8 x B200, 8 a node, 400 Gbit/s" in out
    assert "as given" in out


@pytest.mark.parametrize(
    ("fp8", "line"),
    [
        ("--fp8-format hybrid", "--fp8-recipe delayed (the default), 8 of 8 layers"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "--fp8-recipe blockwise, 8 of 8 layers"),
        ("", None),
    ],
)
def test_a_plan_names_the_fp8_recipe(fp8: str, line: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *f"{MODEL} {fp8} --world-size 1 --top 1".split()]) == 0
    out = capsys.readouterr().out
    assert ("FP8" in out) is (line is not None)
    assert line is None or line in out


def test_a_model_that_fits_nowhere_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL.split(), *"--world-size 1 --memory-gb 0.1".split()]) == 2
    assert "use another number of GPUs, a larger --memory-gb" in capsys.readouterr().err


def test_a_missing_file_is_named_before_what_it_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "none.yaml", "--world-size", "1"]) == 2
    assert "--config none.yaml: No such file" in capsys.readouterr().err


def test_a_missing_batch_size_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = MODEL.replace("--global-batch-size 64", "")
    assert main(["plan", *words.split(), *"--world-size 1".split()]) == 2
    assert "--global-batch-size" in capsys.readouterr().err
