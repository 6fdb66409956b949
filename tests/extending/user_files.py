"""The user's own files of docs/extending.md, and runs of `pretrain.py` that use them."""

import re
from pathlib import Path

from forked_job import ForkedJob
from metrics_files import logged_lines

DOCS = Path(__file__).parents[2] / "docs"
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope --hidden-dropout 0"
    " --attention-dropout 0 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2"
    " --lr-decay-style constant --eval-interval 3 --eval-iters 1 --device cpu --vocab-size 101"
)
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
}
"""Flags of layouts of two ranks."""


def write_example(folder: Path, name: str) -> Path:
    """Write the example of the pages that begins with a comment with this file name."""
    pages = [(DOCS / page).read_text() for page in ("extending.md", "training.md")]
    blocks = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    (text,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    path = folder / name
    path.write_text(text)
    return path


def train(folder: Path, flags: str, num_ranks: int = 1, *, exit_code: int = 0) -> str:
    """Train the tiny model; return the output of rank 0."""
    folder.mkdir(exist_ok=True)
    job = ForkedJob([*MODEL.split(), *flags.split()], num_ranks, folder)
    job.wait()
    assert job.exit_codes == dict.fromkeys(range(num_ranks), exit_code), job.output(0)
    return job.output(0)


def losses(folder: Path, flags: str, num_ranks: int = 1) -> dict[str, float]:
    """Train; return the loss of each iteration and each evaluation."""
    metrics = folder / "metrics.jsonl"
    train(folder, f"{flags} --metrics-file {metrics}", num_ranks)
    return {
        f"{line.get('validation', 'train')} {line['iteration']}": line.get("loss", line.get("lm_loss"))
        for line in logged_lines(metrics)
    }
