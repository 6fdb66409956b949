"""Attention to a cache on a GPU against eager attention of whole sequences in fp64; and the command, against the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_reference import MAX_ERRORS

import pretrain
from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.part import CacheSizes
from megatrain.inference.cache import Cache, CachePlan
from megatrain.inference.cached_attention import CachedAttention, CachedPass
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.tools.main import main

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
LENGTHS = (300, 41, 129)
PASSES = [(200, 0, 64), (0, 40, 1), (64, 1, 0), *[(1, 0, 1)] * 36, (0, 0, 28)]
"""New tokens of each sequence in each pass."""


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize(
    "options", [{}, {"window": 30}, {"softcap": 2.0}, {"softcap": 2.0, "window": 30}], ids=str
)
def test_attention_to_a_cache(d: int, options: dict[str, Any]) -> None:
    spec = AttentionSpec(num_heads=8, num_query_groups=2, head_dim=d, **options)
    layer = CacheSizes(window=spec.window, rows=((2, d), (2, d)))
    plan = CachePlan((layer,), torch.bfloat16, 400, max(LENGTHS), len(LENGTHS), len(LENGTHS))
    cache = Cache(plan, torch.device("cuda"))
    attention = CachedAttention(spec, torch.nn.Identity(), cache.rows[0])
    generator = torch.Generator().manual_seed(d)
    whole = [
        torch.randn(length, 1, 12, d, generator=generator).to("cuda", torch.bfloat16) for length in LENGTHS
    ]
    reservations = [cache.reserve(length) for length in LENGTHS]
    done, found = [0, 0, 0], [[], [], []]
    for counts in PASSES:
        order = [number for number in (2, 0, 1) if counts[number]]
        parts = [whole[number][done[number] : done[number] + counts[number]] for number in order]
        q, k, v = torch.cat(parts).split((8, 2, 2), dim=2)
        info = CachedPass(
            is_training=False, spaces=cache.extend([(reservations[number], counts[number], 0) for number in order]),
            lengths=tuple(counts[number] for number in order), states=(),
        )  # fmt: skip
        out = attention(q, k, v, info).split([counts[number] for number in order])
        for number, one in zip(order, out, strict=True):
            found[number].append(one)
            done[number] += counts[number]
    kernel = EagerAttention(scale=d**-0.5, softcap=spec.softcap)
    for row, parts, length in zip(whole, found, LENGTHS, strict=True):
        out = torch.cat(parts)
        q, k, v = row[: len(out)].double().split((8, 2, 2), dim=2)
        mask = torch.ones(1, 1, len(out), len(out), dtype=torch.bool, device="cuda").tril()
        mask = mask if spec.window is None else mask.triu(-spec.window)
        expected = kernel.forward(q, k, v, MaskSpec(explicit=mask))[0].flatten(2)
        assert len(out) == length
        assert (
            float((out.double() - expected).abs().max() / expected.abs().max()) < MAX_ERRORS[torch.bfloat16]
        )


def test_the_command_computes_the_same_as_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
        " --seq-length 64 --tokenizer-type NullTokenizer --vocab-size 99 --mock-data --micro-batch-size 1 --train-iters 1"
        " --lr 1e-3 --device cpu --position-embedding-type rope --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
    )
    assert pretrain.main([*flags.split(), "--save", str(tmp_path)]) == 0
    found = []
    for device, dtype in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        capsys.readouterr()
        words = [
            "--prompt",
            "5 3 8",
            "7",
            "--max-new-tokens",
            "1",
            "--log-probs",
            "3",
            "--temperature",
            "0",
            "--json",
        ]
        assert main(["generate", "--load", str(tmp_path), "--device", device, "--dtype", dtype, *words]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found.append([one["log_probs"][0]["log_prob"] for one in lines])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[2] == pytest.approx(found[0], rel=2e-2)
