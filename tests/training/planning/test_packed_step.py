"""The dry run draws the packs of the first global batch, and says how far they are from a lower bound."""

import pytest

from megatrain.config import parse
from megatrain.config.environment import LaunchEnvironment
from megatrain.tools.parity.measure import tiny_plan
from megatrain.tools.parity.rows import Layout
from megatrain.training.planning.dry_run import examine
from megatrain.training.planning.dry_run_output import as_text, to_dict
from megatrain.training.planning.packs import pack_domain

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


@pytest.mark.parametrize(
    ("words", "num_in_step", "is_filled"),
    [
        ("tp2 sp dp4 zero1", 1, False),
        ("tp2 sp dp4 zero1 mixtral ep2 etp2", 2, True),
        ("tp2 sp dp4 zero1 mixtral ep2", 1, False),
        ("tp2 sp dp4 zero3", 4, False),
    ],
)
def test_ranks_that_share_experts_or_weights_are_simulated_in_step(words, num_in_step, is_filled):
    layout = Layout.of(f"{words} tokens packs")
    found = pack_domain(tiny_plan(layout, layout.world_size))
    assert (found.num_in_step, found.filler_length > 0) == (num_in_step, is_filled)


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
