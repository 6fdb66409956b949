"""The teachers of rows with distillation: models of another depth and width, with drawn weights in place of a checkpoint."""

from __future__ import annotations

from megatrain.config import Facts, parse, resolve
from megatrain.config.facts import TeacherFacts
from megatrain.parallel.initialize import InitialWeights
from megatrain.tools.parity.rows import Layout
from megatrain.training.distillation.teacher import RunTeacher
from megatrain.training.engine import Engine

_FLAGS = (
    "--num-layers 6 --hidden-size 24 --num-attention-heads 24 --kv-channels 4 --ffn-hidden-size 48"
    " --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --init-method-std 0.3"
    " --hidden-dropout 0.1 --attention-dropout 0.1 --final-logit-softcapping 5"
    " --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --train-iters 1 --lr 1 --device cpu"
)
_EXPERTS = " --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-layer-freq 2"
_SEED = 4321


def teacher_of(layout: Layout, *, vocab_size: int, seq_length: int) -> TeacherFacts:
    """Return the teacher of a row: it has experts and copies of keys and values if the student does."""
    flags = _FLAGS + (_EXPERTS if "--num-experts" in layout.flags() else "")
    groups = 1 if layout.has("puzzle") else layout.size("key-value replication")
    flags += f" --group-query-attention --num-query-groups {groups or 24}"
    flags += f" --vocab-size {vocab_size} --seq-length {seq_length}"
    config = resolve(
        parse(flags.split()), Facts(vocab_size=vocab_size, eod_id=vocab_size - 1)
    ).config.to_dict()
    return TeacherFacts(
        path="a drawn teacher",
        iteration=0,
        config={name: config[name] for name in ("model", "experts")},
        num_rows=vocab_size,
        is_ours=True,
        tokenizer_fingerprint=None,
        checksum=0,
    )


def draw_teacher(engine: Engine) -> None:
    """Draw the weights of an engine's teacher, if it has one: the same under every layout."""
    distillation = engine.model.distillation
    if distillation is not None:
        assert isinstance(distillation.teacher, RunTeacher)
        distillation.teacher.draw(InitialWeights(_SEED))
