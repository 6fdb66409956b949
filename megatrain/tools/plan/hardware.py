"""Hardware of a plan: the rates that kernels and collectives reach on GPUs, and where these were measured.

    data sheet of the GPU x fractions measured on H200 ─> times of kernels
    links in a node, network between nodes ─> times of collectives

Only an H200 was measured; the other GPUs are assumed to reach the same fractions of their data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.training.planning.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Calibrated constants. Fractions are of the GPU's data sheet, times in seconds.

    Sources: [A1], [A2], [S1], [B3], [B6], [B7] cases of docs/benchmarks.md and docs/internals/performance.md on H200;
    [limits] the limits measured kernel by kernel on the same machines.
    """

    gemms: float = 0.68
    """GEMMs, of the peak: 673 TFLOP/s within steps of [A1], 700 of [S1], with gradient sums."""
    fp8_gemms: float = 1.36
    """GEMMs in FP8 of forward passes: 1,253 to 1,419 TFLOP/s for the layers of [A2] [limits]."""
    fp8_exact_gemms: float = 1.27
    """GEMMs in FP8 that keep all bits of partial sums, of backward passes: 1,193 to 1,312 TFLOP/s [limits]."""
    fp8_block_gemms: float = 0.99
    """GEMMs in FP8 with scales of blocks: 980 TFLOP/s. A layer of 4096 x 14336 of Transformer Engine takes 3.21 ms with
    blocks and 2.41 with `delayed` scales [limits]; casts and norm take 0.25 of both. `mxfp8` is assumed as fast as one scale."""
    gemm_seconds: float = 10e-6
    """Fixed time of a GEMM: a GEMM of 5e10 FLOPs reaches three quarters of the rate of large ones [limits]."""
    grouped_rows: float = 350.0
    """Rows per expert at which grouped GEMMs reach half of their rate: 517 TFLOP/s at 1,024 rows, 488 at 768."""
    attention: float = 0.67
    """Causal attention forward at long sequences, of the peak: 634 TFLOP/s at 8,192, 656 at 32,768 [limits]."""
    attention_length: float = 400.0
    """Sequence length at which it reaches half of that."""
    attention_backward: float = 0.63
    """Backward: 498 TFLOP/s at 8,192, 608 at 32,768 [limits]."""
    attention_backward_length: float = 2000.0
    full_head: int = 128
    """Channels of a head at which the forward pass is bound by GEMMs; narrower heads by exponentials [S1]."""
    dropout_attention: float = 0.53
    """Forward with dropout, of the speed without: 341 of 634 TFLOP/s."""
    dropout_attention_backward: float = 0.40
    """Backward with dropout: 196 of 498 TFLOP/s."""
    memory: float = 0.83
    """Memory-bound kernels, of the memory's rate: 4.0 of 4.8 TB/s [A1]."""
    casts: float = 0.77
    """Casts to FP8 and passes for largest values, of the memory's rate: 3.58 to 3.86 TB/s (scripts/benchmarks/fp8.py)."""
    links: float = 0.55
    """Collectives within a node, of NVLink's rate in one direction: 250 GB/s of 450 [B3]."""
    messages: float = 0.71
    """A message between two GPUs of a node: 67 MB in 0.21 ms, 319 GB/s (pipeline cases)."""
    network: float = 0.80
    """Collectives between nodes, of the adapters' rate. Assumed, not measured."""
    link_seconds: float = 25e-6
    """Latency of a collective within a node, with its launch: 0.16 to 0.18 ms for 33 MB [limits]."""
    network_seconds: float = 40e-6
    """Latency of a collective between nodes; further nodes add `hop_seconds` each. Assumed, not measured."""
    hop_seconds: float = 3e-6
    """Latency of one more step of a ring, or of a level of a tree. Assumed, not measured."""
    tensor_exposed: float = 0.5
    """Fraction of overlapped collectives of NCCL in a node that still costs time, since NCCL shares SMs and memory [B3]."""
    network_exposed: float = 0.15
    """The same between nodes, where they need a tenth of the memory's rate: 20 of 132 SMs (arXiv:2412.19437, section 3.2.2).
    Not measured here."""
    tensor_overlap: float = 0.49
    """Seconds by which kernels are slower for each second in which copy engines send (--tp-comm-overlap): 3 to 8 % of them [B3]."""
    all_to_all: float = 0.44
    """All-to-all within a node, of the rate of rings: 110 GB/s between four GPUs, with waits for the rank with the most tokens [B6]."""
    forwarded: float = 0.67
    """All-to-all within a node, of NVLink's rate, whose ranks have waited for one another in a step before: 304 GB/s between eight
    GPUs in a CUDA graph (docs/internals/performance.md)."""
    host_wait_seconds: float = 1e-3
    """Time in which the GPU has no work after the host has read the counts of an all-to-all: with all-gathers, whose counts
    the host does not read, a step is 93 and 149 ms shorter [B6, B7]; 49 and 51 of these are communication, and 64 and 56 waits
    are saved. Depends on the host."""
    reduce_exposed: float = 0.3
    """Fraction of overlapped gradient reductions that costs time all the same, as they share SMs and memory [B1]."""
    step_seconds: float = 6e-3
    """Rest of a step: batches, report, launches [A1]."""
    optimizer_bytes: float = 34.0
    """Bytes per weight of a shard: 30 of AdamW, 4 of the gradient norm [A1]."""
    gradient_bytes: float = 4.0
    """Bytes per weight of a rank: gradients are cleared."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs of one kind in nodes of equal size."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    network_rate: float
    """Bytes per second and GPU between nodes, in one direction."""
    rates: Rates = Rates()

    def compute_rate(self, fraction: float) -> float:
        """Return FLOPs per second."""
        return self.gpu.peak * fraction

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the time of memory-bound kernels that read and write `num_bytes`."""
        return num_bytes / (self.gpu.memory_rate * self.rates.memory)

    def cast_seconds(self, num_bytes: float) -> float:
        """Return the time of casts to FP8 that read and write `num_bytes`."""
        return num_bytes / (self.gpu.memory_rate * self.rates.casts)
