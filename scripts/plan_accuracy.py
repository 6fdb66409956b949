#!/usr/bin/env python3
"""Compare the predictions of `megatrain plan` with the measured steps and peak memory of docs/benchmarks.md, on H200. Needs no GPU.

python scripts/plan_accuracy.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout
from megatrain.tools.plan.memory import planned_bytes
from megatrain.tools.plan.search import Found, Run, evaluate
from megatrain.training.planning.gpus import GPUS

_CASES: Final = Path(__file__).parents[1] / "configs" / "benchmarks"


@dataclass(frozen=True)
class Measured:
    """A measured case."""

    name: str
    world_size: int
    milliseconds: tuple[float, ...]
    """Medians of steps: one, or the fastest and the slowest of several machines and calls."""
    gigabytes: float
    """Peak of the rank that needs most, in 10^9 bytes."""
    flags: str
    config: str | None = None
    """File of configs/benchmarks/."""
    note: str = ""
    """Reason for which memory is not comparable."""

    @property
    def words(self) -> list[str]:
        """The flags of pretrain.py."""
        config = [] if self.config is None else ["--config", str(_CASES / f"{self.config}.yaml")]
        return [*config, *self.flags.split()]


_STAGES: Final = "--num-layers 16 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout auto"
_7B: Final = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 8 --seq-length 8192"
    " --max-position-embeddings 8192 --train-iters 25 --tokenizer-type NullTokenizer --vocab-size 131073 --lr 1.5e-4"
    " --bf16 --deterministic-mode --mock-data --tensor-model-parallel-size"
)
_A2: Final = "--fp8-recipe"
_B3: Final = "--global-batch-size 4 --tensor-model-parallel-size 2"
_CP8: Final = "--context-parallel-size 8 --max-position-embeddings 131072 --data-parallel-sharding-strategy optim_grads_params"
_MIXED: Final = (
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 2"
    " --global-batch-size 8"
)
_FP8: Final = (
    "--fp8-format hybrid --fp8-recipe tensorwise --global-batch-size 128 --data-parallel-sharding-strategy"
)
_EP2: Final = "--global-batch-size 16 --expert-model-parallel-size 2"
_TE: Final = "ran with Transformer Engine, planned as local"
MEASURED: Final = (
    Measured("A1", 1, (1509, 1590), 94.9, "", "a1"),
    Measured("A2 delayed", 1, (1120, 1131), 99.5, f"{_A2} delayed", "a2"),
    Measured("A2 tensorwise", 1, (1152,), 99.5, f"{_A2} tensorwise", "a2"),
    Measured("A2 blockwise", 1, (1294,), 103.3, f"{_A2} blockwise", "a2"),
    Measured("A2 TE", 1, (1152,), 105.4, f"{_A2} delayed", "a2", note=_TE),
    Measured("S1", 1, (907, 961), 18.9, "--recompute-mlp-act", "s1"),
    Measured("B1 dp2", 2, (2967,), 121.9, "--global-batch-size 8", "b1"),
    Measured("B1 dp4", 4, (2889, 2930), 98.4, "", "b1"),
    Measured("B1 dp4, FP8", 4, (2083,), 107.7, "--fp8-format hybrid --fp8-recipe delayed", "b1"),
    Measured(
        "B1 dp2, FP8",
        2,
        (2079,),
        131.0,
        "--global-batch-size 8 --fp8-format hybrid --fp8-recipe delayed",
        "b1",
    ),
    Measured("B3 tp2", 2, (1609, 1668), 85.4, f"{_B3} --no-tp-comm-overlap", "b3"),
    Measured("B3 tp2, overlap", 2, (1525, 1540), 85.4, _B3, "b3"),
    Measured("B3 tp4", 4, (1872,), 43.1, "--no-tp-comm-overlap", "b3"),
    Measured("B3 tp4, overlap", 4, (1685, 1778), 43.4, "", "b3"),
    Measured("B3 tp8", 8, (1269,), 21.7, "--tensor-model-parallel-size 8", "b3"),
    Measured("B5 cp8", 8, (5226,), 76.6, f"{_CP8} --seq-length 131072 --global-batch-size 1", "b5"),
    Measured("B1 tp2 cp2 pp2", 8, (972,), 35.8, _MIXED, "b1"),
    Measured("B1 ZeRO-2, FP8", 8, (9165,), 71.3, f"{_FP8} optim_grads", "b1"),
    Measured("B1 ZeRO-3, FP8", 8, (9791,), 51.3, f"{_FP8} optim_grads_params", "b1"),
    Measured(
        "B5 cp2",
        2,
        (2316,),
        80.2,
        "--global-batch-size 2 --context-parallel-size 2 --num-layers 16 --cp-comm-type p2p",
        "b5",
    ),
    Measured("B5 cp4", 4, (4600,), 97.8, "--cp-comm-type p2p", "b5"),
    Measured("B5 cp4, heads", 4, (4428, 4459), 100.6, "", "b5"),
    Measured("B6 ep2", 2, (797, 819), 122.1, _EP2, "b6"),
    Measured("B6, all-to-all", 2, (858, 901), 114.8, f"{_EP2} --no-moe-alltoall-as-allgather", "b6"),
    Measured("B6 ep4", 4, (740, 761), 69.8, "", "b6"),
    Measured("B7 ep2", 2, (866, 871), 103.5, _EP2, "b7"),
    Measured("B7, all-to-all", 2, (947, 1017), 96.0, f"{_EP2} --no-moe-alltoall-as-allgather", "b7"),
    Measured("B7 ep4", 4, (836, 843), 60.7, "", "b7"),
    Measured("B8 ep4", 4, (895, 917), 92.6, "", "b8"),
    Measured("7B tp2", 2, (3577,), 106.2, f"{_7B} 2 --no-sequence-parallel", note=_TE),
    Measured("7B tp4", 4, (1778,), 41.3, f"{_7B} 4", note="peak memory was not measured"),
    Measured("1f1b", 2, (3462.7,), 59.35, f"{_STAGES} --pipeline-schedule 1f1b", "b4"),
    Measured(
        "interleaved",
        2,
        (3261.1,),
        62.84,
        f"{_STAGES} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
        "b4",
    ),
    Measured("zb-h1", 2, (3246.5,), 63.20, f"{_STAGES} --pipeline-schedule zb-h1", "b4"),
    Measured("zb-v", 2, (3584.4,), 62.29, f"{_STAGES} --pipeline-schedule zb-v", "b4"),
    Measured("dualpipe-v", 2, (3661.4,), 59.23, f"{_STAGES} --pipeline-schedule dualpipe-v", "b4"),
)


def predicted(case: Measured) -> Found:
    """Return what the cost model and the memory plan say of a case."""
    gpu = GPUS["H200"]
    cluster = Cluster(gpu=gpu, num_gpus=case.world_size, gpus_per_node=8, network_rate=gpu.network_rate)
    run = Run.of(case.words, cluster)
    plan, workload = run.plan(), run.workload()
    layout = Layout.of(plan)
    return evaluate(run, workload, layout, planned_bytes(workload, layout, plan))


def main() -> None:
    print(f"{'case':<16}{'ms':>14}{'predicted':>11}  {'ratio':<13}{'GB':>7}{'planned':>9}{'ratio':>7}")
    for case in MEASURED:
        found = predicted(case)
        milliseconds, gigabytes = found.time.total * 1e3, found.memory_bytes / 1e9
        measured = " to ".join(f"{one:.0f}" for one in case.milliseconds)
        ratios = ", ".join(f"{milliseconds / one:.3f}" for one in case.milliseconds)
        print(
            f"{case.name:<16}{measured:>14}{milliseconds:>11.0f}  {ratios:<13}"
            f"{case.gigabytes:>7.1f}{gigabytes:>9.1f}{gigabytes / case.gigabytes:>7.3f}  {case.note}".rstrip(),
            flush=True,
        )


if __name__ == "__main__":
    main()
