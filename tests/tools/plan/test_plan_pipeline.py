"""`megatrain plan pipeline`: its flags give the simulated split, its table is sorted, its drawing has every pass."""

import dataclasses
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from megatrain.config import Facts, parse, resolve
from megatrain.config.schema.pipeline_schedules import PIPELINE_SCHEDULES
from megatrain.tools.main import main
from megatrain.tools.plan.pipeline import Candidate, Case, candidates

IMAGES = Path(__file__).parents[3] / "docs" / "images"
CASE = Case(
    ranks=4, layers=16, microbatches=8, forward=1, backward=1.2, weight_gradient=0.8, head=2.5, transfer=0.05
)
WORKING = (
    "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --lr 1e-3 --micro-batch-size 1"
    " --global-batch-size 8 --train-iters 10 --mock-data --vocab-size 100 --max-position-embeddings 128"
)


@pytest.mark.parametrize("found", list(candidates(CASE)), ids=lambda one: one.flags)
def test_the_flags_give_the_simulated_schedule_and_split(found: Candidate) -> None:
    plan = resolve(parse([*WORKING.split(), *shlex.split(found.flags)]), Facts(world_size=4))
    assert plan.derived.pipeline_layers == found.counts
    assert plan.config.parallel.pipeline_schedule == found.schedule.kind
    assert sum(found.counts) == 16


def test_a_balanced_split_is_faster_than_an_equal_one() -> None:
    """The head costs as much as two and a half layers."""
    times = {
        (
            one.schedule.kind,
            one.schedule.placement.num_chunks,
            len(set(one.counts)) == 1,
        ): one.simulation.duration
        for one in candidates(CASE)
    }
    kinds = [(name, traits.num_chunks or 2) for name, traits in PIPELINE_SCHEDULES.items()]
    for kind, chunks in (*kinds, ("interleaved", 4)):
        assert times[kind, chunks, False] < times[kind, chunks, True]
    assert times["zb-h1", 1, False] < times["1f1b", 1, False]


def test_the_table_is_sorted_and_the_drawing_has_every_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = tmp_path / "timeline.svg"
    words = f"plan pipeline --ranks 4 --layers 8 --microbatches 6 --head 1.5 --output {drawing}"
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    times = [float(line.split()[0]) for line in lines[1:-1]]
    assert times == sorted(times)
    assert "--pipeline-model-parallel-size 4" in lines[1]
    root = ET.fromstring(drawing.read_text())
    chunks = 2 if "-v" in lines[1] else 1
    boxes = [node for node in root if node.tag.endswith("rect") and node.get("stroke")]
    assert len(boxes) == 4 * chunks * 6 * 3


def test_too_many_ranks_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan pipeline --ranks 8 --layers 4 --microbatches 2".split()) == 2
    assert "--ranks 5 or fewer" in capsys.readouterr().err


def test_an_unknown_schedule_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main("plan pipeline --ranks 2 --layers 4 --microbatches 2 --schedule no-such-schedule".split()) == 2
    )
    assert "dualpipe-v" in capsys.readouterr().err


def test_a_timeline_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = f"plan pipeline --ranks 2 --layers 4 --microbatches 4 --output {tmp_path}/file/timeline.svg"
    assert main(words.split()) == 2
    assert "fix: name a file in a folder that can be written" in capsys.readouterr().err


def test_combined_passes_that_overlap_shorten_dualpipe_v() -> None:
    overlapped = dataclasses.replace(CASE, combined=0.8)
    times = [
        {one.schedule.kind: one.simulation.duration for one in candidates(case)}
        for case in (CASE, overlapped)
    ]
    faster = {kind for kind, time in times[1].items() if time < times[0][kind]}
    assert faster == {"dualpipe-v"}


@pytest.mark.parametrize("kind", [kind for kind in PIPELINE_SCHEDULES if (IMAGES / f"{kind}.svg").exists()])
def test_the_timelines_of_the_documentation_are_drawn_by_the_command(tmp_path: Path, kind: str) -> None:
    drawing = tmp_path / "timeline.svg"
    words = f"plan pipeline --ranks 4 --layers 8 --microbatches 8 --schedule {kind} --output {drawing}"
    assert main(words.split()) == 0
    assert drawing.read_text() == (IMAGES / f"{kind}.svg").read_text()
