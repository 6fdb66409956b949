"""BERT, T5 and vision-language models have the losses and gradients of plain ones, also with flags that no recorded run has."""

from __future__ import annotations

import pytest
import torch
from plain_models import PlainModel

from megatrain.config import parse
from megatrain.config.derive.vision import tokens_per_image
from megatrain.parallel.batch import Batch
from megatrain.parallel.family_batch import family_batch
from megatrain.tools.parity.measure import gradients_of, master_weights_of
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.trainer import Trainer

GRADIENT = 1e-5
VOCAB, B, S, DECODER = 60, 2, 20, 12
RUN = (
    f"--hidden-size 24 --ffn-hidden-size 30 --num-attention-heads 4 --max-position-embeddings 40 --seq-length {S} --micro-batch-size {B}"
    f" --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} --device cpu --init-method-std 0.1"
    " --attention-dropout 0 --hidden-dropout 0 --model-family"
)
BERT, T5 = "bert --num-layers 2", f"t5 --encoder-num-layers 2 --decoder-seq-length {DECODER}"
VLM = "vlm --encoder-num-layers 1 --decoder-num-layers 2 --img-h 8 --img-w 12 --patch-dim 4"
ROPE = "--position-embedding-type rope --kv-channels 8 --rotary-percent 0.5 --rotary-base 100"
PLAIN = "--normalization RMSNorm --disable-bias-linear"
RELATIVE = "--position-embedding-type relative --relative-attention-num-buckets 7 --relative-attention-max-distance 9"


@pytest.mark.parametrize("flags", [
    f"{BERT} {PLAIN} --swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    f"{BERT} --normalization RMSNorm --qk-layernorm --apply-layernorm-1p --norm-epsilon 1e-3",
    f"{BERT} --disable-bias-linear --bert-no-binary-head {ROPE}",
    f"{BERT} --squared-relu --kv-channels 10 --group-query-attention --num-query-groups 1",
    f"{T5} {PLAIN}",
    f"{T5} {RELATIVE} --no-bias-gelu-fusion",
    f"{T5} {ROPE} --swiglu --untie-embeddings-and-output-weights --qk-layernorm",
    f"{VLM} {ROPE} {PLAIN} --vision-projection-norm",
    f"{VLM} --disable-vision-class-token --group-query-attention --num-query-groups 2 --squared-relu --no-vision-projection-norm",
    f"{VLM} --position-embedding-type none --swiglu --apply-layernorm-1p",
])  # fmt: skip
def test_losses_and_gradients_are_those_of_the_plain_model(flags: str) -> None:
    torch.manual_seed(0)
    with joined_ranks(parse(f"{RUN} {flags}".split()), Phases(Console(is_quiet=True))) as ranks:
        trainer = Trainer(ranks)
        engine, config = trainer.engine, trainer.plan.config
        engine.initialize()
        for weight in engine.optimizer.state("weight"):  # biases are not 0, and norms not 1
            weight.add_(0.1 * torch.randn(weight.shape))
        engine.optimizer.sync_model_weights()
        weights = {
            part.name: torch.from_numpy(part.values).double().requires_grad_()
            for part in master_weights_of(engine)
        }
        batch = batch_of(config.model.model_family, tokens_per_image(config.vision))
        engine.accumulate_gradients([batch])
        found = {part.name: torch.from_numpy(part.values) for part in gradients_of(engine)}
    losses, order = PlainModel(config.model, config.vision, weights).token_losses(batch)
    loss = (losses * batch.loss_mask).sum() / batch.loss_mask.sum()
    (loss if order is None else loss + order).backward()
    assert found.keys() == weights.keys()
    expected = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert expected.keys() == found.keys()
    # Exact gradients of biases of keys are 0, since softmax ignores what all scores have in common.
    smallest = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).abs().max())
        assert difference <= max(GRADIENT * float(gradient.abs().max()), smallest), name


def batch_of(family: str, vectors: int) -> Batch:
    """Return a micro-batch of random ids; its second sample ends with padding. An image has these vectors."""
    ids, other = torch.randint(1, VOCAB, (2, B, S))
    is_token = torch.arange(S) < torch.tensor([[S], [S - 7]])
    if family == "bert":
        is_masked = is_token & (torch.arange(S) % 5 == 2)
        return family_batch("bert", {
            "text": ids, "types": torch.arange(S).expand(B, S) // 8 % 2, "labels": other, "is_random": torch.tensor([0, 1]),
            "loss_mask": is_masked & (is_masked.cumsum(-1) < 3), "padding_mask": is_token,
        })  # fmt: skip
    if family == "t5":
        mask = torch.arange(DECODER) < torch.tensor([[DECODER], [5]])
        return family_batch("t5", {
            "text_enc": ids, "text_dec": other[:, :DECODER] * mask, "labels": ids[:, :DECODER], "loss_mask": mask, "enc_mask": is_token,
        })  # fmt: skip
    images, before = torch.randn(B, 1, 3, 8, 12), torch.zeros(B, vectors, dtype=torch.int64)
    return family_batch("vlm", {
        "tokens": torch.cat([before - 1 - torch.arange(vectors), ids], 1), "labels": torch.cat([before - 1, other], 1),
        "loss_mask": torch.cat([before, is_token], 1), "position_ids": torch.cat([before, torch.arange(1, S + 1).expand(B, S)], 1),
        "images": images,
    })  # fmt: skip
