"""Time distillation of a 1B student by an 8B teacher, both of Llama 3's shape with drawn weights, on one GPU.

    python scripts/benchmarks/distillation.py
    python scripts/benchmarks/distillation.py --tiny --device cpu     models that a CPU computes at once

    student alone        the step without a teacher
    teacher alone        its forward passes over the micro-batches of a step, and its logits
    distillation         the step with the teacher, from its logits; of the sum of the two above
    with the LM loss     --no-kd-skip-lm-loss
    cached logits        the step from the files of `megatrain cache-logits`; of the student alone

Times are medians of the last iterations, in one process. The folder that names the teacher has a sparse file, which is not read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch

from megatrain.config import parse
from megatrain.parallel.initialize import InitialWeights
from megatrain.tools.cache_logits import write_cache
from megatrain.training.distillation.teacher import RunTeacher
from megatrain.training.launch.ranks import joined_ranks
from megatrain.training.trainer import Trainer

REPEATS = 5
"""Iterations at the end that count."""
LOGIT_ROWS = 1024
"""Tokens whose logits are computed together."""
FLAGS = (
    "--group-query-attention --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --eval-iters 0"
    " --lr 1e-4 --log-interval 1 --save none"
)
STUDENT = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --num-query-groups 8 --vocab-size 128256"
    " --rotary-base 500000 --seq-length 4096 --micro-batch-size 2 --global-batch-size 8 --bf16"
)
TINY_STUDENT = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2 --vocab-size 300"
    " --seq-length 64 --micro-batch-size 2 --global-batch-size 4"
)


@dataclass(frozen=True)
class TeacherShape:
    """Sizes of the teacher, as config.json has them."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int

    def write(self, folder: Path) -> None:
        """Write a folder of transformers whose weights take no space."""
        kv, hidden = self.hidden // self.heads * self.groups, self.hidden
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.ffn, hidden),
            "mlp.up_proj": (self.ffn, hidden),
            "mlp.down_proj": (hidden, self.ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        tensors: dict[str, tuple[int, ...]] = {
            f"model.layers.{number}.{name}.weight": shape
            for number in range(self.layers)
            for name, shape in shapes.items()
        }
        tensors |= {"model.norm.weight": (hidden,)}
        tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (self.vocab, hidden))
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "vocab_size": self.vocab,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))


LLAMA_8B = TeacherShape(32, 4096, 14336, 32, 8, 128256)
TINY_TEACHER = TeacherShape(4, 128, 192, 4, 2, 300)


class DrawnTeachers:
    """Gives each teacher drawn weights in place of those of its folder; keeps the last one and its last pass."""

    last: RunTeacher
    arguments: tuple[Any, ...]

    def __init__(self) -> None:
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        run = RunTeacher.run

        def load(teacher: RunTeacher, **_: Any) -> mock.Mock:
            self.last = teacher
            teacher.draw(InitialWeights(1))
            return mock.Mock(path=teacher.path, iteration=0)

        def kept(teacher: RunTeacher, *arguments: Any) -> None:
            self.arguments = arguments
            run(teacher, *arguments)

        self._patches.enter_context(mock.patch.object(RunTeacher, "load", load))
        self._patches.enter_context(mock.patch.object(RunTeacher, "run", kept))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    @torch.no_grad()
    def milliseconds(self) -> float:
        """Return the time of a pass of the last teacher, with its logits."""
        times = []
        for _ in range(REPEATS + 1):
            start = self._now()
            self.last.forget()
            self.last.run(*self.arguments)
            (batch,), (info,) = self.arguments
            rows = self.last.head.rows(self.last.outputs(batch, info).normed, info)
            for part in rows.split(LOGIT_ROWS):
                self.last.head.chunk_logits(part)
            times.append(1000 * (self._now() - start))
        return statistics.median(times[1:])

    def _now(self) -> float:
        if self.last.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(flags: list[str], metrics: Path) -> float:
    """Train; return the median time of a step in ms."""
    with joined_ranks(parse([*flags, "--metrics-file", str(metrics)])) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        trainer.train()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [row["iteration_ms"] for row in rows if "iteration_ms" in row]
    return float(statistics.median(times[-REPEATS:]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="models that a CPU computes at once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--iterations", type=int, default=10, help="of each run [10]")
    arguments, more = parser.parse_known_args()
    student = [*FLAGS.split(), *(TINY_STUDENT if arguments.tiny else STUDENT).split(), *more]
    flags = [*student, "--device", arguments.device, "--train-iters", str(arguments.iterations)]
    with tempfile.TemporaryDirectory() as name, DrawnTeachers() as teachers:
        folder = Path(name)
        (folder / "teacher").mkdir()
        (TINY_TEACHER if arguments.tiny else LLAMA_8B).write(folder / "teacher")
        taught = [*flags, "--export-kd-teacher-load", f"hf:{folder / 'teacher'}"]
        distilled = train(taught, folder / "distilled.jsonl")
        micro, whole = (int(flags[flags.index(f"--{one}-batch-size") + 1]) for one in ("micro", "global"))
        teacher = whole // micro * teachers.milliseconds()
        alone = train(flags, folder / "alone.jsonl")
        mixed = train([*taught, "--no-kd-skip-lm-loss"], folder / "mixed.jsonl")
        with joined_ranks(parse(taught)) as ranks:
            write_cache(ranks, folder / "logits", 64, "fp16")
        cached = train([*flags, "--logits-load-dir", str(folder / "logits")], folder / "cached.jsonl")
    print(f"\n{'':<20} {'ms':>9}")
    print(f"{'student alone':<20} {alone:9.1f}")
    print(f"{'teacher alone':<20} {teacher:9.1f}")
    print(f"{'distillation':<20} {distilled:9.1f} {distilled / (alone + teacher) - 1:+8.1%}")
    print(f"{'with the LM loss':<20} {mixed:9.1f} {mixed / (alone + teacher) - 1:+8.1%}")
    print(f"{'cached logits':<20} {cached:9.1f} {cached / alone - 1:+8.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
