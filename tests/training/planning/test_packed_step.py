"""The dry run draws the packs of the first global batch, and says how far they are from a lower bound."""

import pytest

from megatrain.config import parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.training.planning.dry_run import examine
from megatrain.training.planning.dry_run_output import as_text, to_dict

RUN = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --mock-data --vocab-size 300 --lr 1e-3 --train-iters 4"
    " --seq-length 16384 --position-embedding-type rope --attention-dropout 0 --micro-batch-size 1 --global-batch-size 32"
    " --calculate-per-token-loss --pack-documents --dynamic-context-parallel --world-size 4 --dry-run --device cpu"
)
LENGTHS = '{"type": "lognormal", "min_seq_len": 64, "max_seq_len": 16384, "mean_seq_len": 3000, "lognormal_sigma": 1.5}'


@pytest.fixture(scope="module")
def found():
    return examine(parse([*RUN.split(), "--varlen-mock-dataset-config-json", LENGTHS]), LaunchEnvironment())


def test_it_has_the_documents_of_the_first_batch(found):
    packs = found.packs
    assert packs.documents == 32
    assert 32 * 64 < packs.tokens < 32 * packs.longest <= 32 * 16384
    assert packs.time_over_bound >= 1
    assert set(packs.time_by_scheduler) == {"dp_balanced", "first_fit"}
    assert to_dict(found)["packs"]["drawing"] == packs.drawing


def test_each_rank_has_a_line_of_letters(found):
    text = as_text(found)
    lines = [line for line in text.splitlines() if line.startswith("  rank ") and len(line) > 70]
    assert len(lines) == 4
    assert f"of {found.packs.tokens:,} tokens, the longest {found.packs.longest:,}" in text


def test_memory_is_that_of_the_largest_pack(found):
    assert found.plan.config.parallel.max_seqlen_per_dp_cp_rank == 4096
    most = examine(  # eager attention on a CPU also has scores
        parse(
            [
                *RUN.split(),
                "--max-seqlen-per-dp-cp-rank",
                "8192",
                "--varlen-mock-dataset-config-json",
                LENGTHS,
            ]
        ),
        LaunchEnvironment(),
    )
    assert most.memory[0].activations > 1.5 * found.memory[0].activations
