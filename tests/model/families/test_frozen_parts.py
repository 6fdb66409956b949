"""Frozen parts of a vision-language model have no gradients, no optimizer state, no backward pass, and do not move."""

from pathlib import Path

import pytest
import torch
from metrics_files import logged_losses

import pretrain
from megatrain.config import parse
from megatrain.model.families.vision import ImagesInText
from megatrain.optim.sharded import WEIGHT
from megatrain.training.batches import build_samples
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.logging.console import Console, Phases
from megatrain.training.planning.memory_plan import planned_resident_memory, resident_memory
from megatrain.training.trainer import Trainer

FLAGS = (
    "--model-family vlm --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 16"
    " --img-h 8 --img-w 8 --patch-dim 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --micro-batch-size 2"
    " --global-batch-size 4 --train-iters 2 --lr 0.01 --weight-decay 0.1 --eval-iters 0 --device cpu --num-workers 0"
)


def is_frozen(name: str, flag: str) -> bool:
    is_tower = name.startswith("vision.") and not name.startswith("vision.projector.")
    is_language = not name.startswith("vision.")
    return (is_tower and "ViT" in flag) or (is_language and "LM" in flag)


@pytest.mark.parametrize("flag", ["--freeze-ViT", "--freeze-LM", "--freeze-ViT --freeze-LM"])
def test_frozen_parts_cost_nothing_and_stay(flag: str) -> None:
    with joined_ranks(parse(f"{FLAGS} {flag}".split()), Phases(Console(is_quiet=True))) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        engine = trainer.engine
        before = {box.piece.name: x.clone() for _, box, x in engine.optimizer.owned(WEIGHT)}
        moments = {box.piece.name for _, box, _ in engine.optimizer.owned("exp_avg")}
        assert moments == {name for name in before if not is_frozen(name, flag)}
        for bucket, gradients, moment in zip(
            engine.buffers.buckets,
            engine.buffers.gradients.full,
            engine.optimizer.state("exp_avg"),
            strict=True,
        ):
            assert len(gradients) == len(moment) == (bucket.size if bucket.is_trained else 0)
        assert trainer.train() == 0
        after = {box.piece.name: x for _, box, x in engine.optimizer.owned(WEIGHT)}
        for name, values in before.items():
            assert torch.equal(values, after[name]) == is_frozen(name, flag) or not values.numel(), name
        assert resident_memory(engine.optimizer, engine.model) == planned_resident_memory(
            ranks.plan, ranks.grid
        )
        assert build_samples(ranks.plan, ranks.facts).train is not None


def test_a_frozen_tower_has_no_graph() -> None:
    with joined_ranks(parse(f"{FLAGS} --freeze-ViT".split()), Phases(Console(is_quiet=True))) as ranks:
        engine = Trainer(ranks).engine
        (start, *_) = engine.model.segments
        assert isinstance(start, ImagesInText)
        assert len(start.tower) == 3  # patches, two layers
        assert not any(parameter.requires_grad for parameter in start.tower.parameters())


def losses_of(flags: str, metrics: Path) -> list[float]:
    assert pretrain.main(f"{flags} --metrics-file {metrics}".split()) in (0, 75)  # 75: --exit-interval
    return logged_losses(metrics)


def test_a_run_with_a_frozen_tower_resumes_bit_for_bit(tmp_path: Path) -> None:
    flags = f"{FLAGS} --freeze-ViT --train-iters 4 --lr-decay-iters 4 --num-workers 1"
    whole = losses_of(flags, tmp_path / "whole.jsonl")
    halves, metrics = f"{flags} --save {tmp_path / 'save'} --save-interval 2", tmp_path / "halves.jsonl"
    losses_of(f"{halves} --exit-interval 2", metrics)
    assert losses_of(f"{halves} --load {tmp_path / 'save'}", metrics) == whole
