"""Queries of padding: their scores are equal, as in Megatron-LM's local layers, also where chance masks a word by [PAD]."""

from __future__ import annotations

import pytest
import torch

from megatrain.config import parse
from megatrain.model.families.masked_attention import MaskedAttention
from megatrain.parallel.batch import PassInfo
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

BERT = (
    "--model-family bert --num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 6 --max-position-embeddings 6"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 16 --micro-batch-size 2 --train-iters 1 --lr 1 --device cpu"
    " --attention-dropout 0"
)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_query_of_padding_attends_to_all_keys_alike(backend: str) -> None:
    is_token = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    with joined_ranks(parse(f"{BERT} --attention-backend {backend}".split()), Phases(Console())) as ranks:
        segments = Trainer(ranks).engine.model.segments
        modules = [module for segment in segments for module in segment.modules()]
        (attention,) = [module for module in modules if isinstance(module, MaskedAttention)]
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, 6, 2, 2, 6, generator=generator)
        out = attention(q, k, v, PassInfo(is_token=is_token)).unflatten(-1, (2, 6))
    assert torch.allclose(out[[2, 5], 0], v[:, 0].mean(0), rtol=0, atol=1e-6)
    kept = [0, 1, 3, 4]
    scores = torch.einsum("snd,tnd->nst", q[kept, 0], k[kept, 0]) / 6**0.5
    expected = torch.einsum("nst,tnd->snd", scores.softmax(-1), v[kept, 0])
    assert torch.allclose(out[kept, 0], expected, rtol=0, atol=1e-6)
