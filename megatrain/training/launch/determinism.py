"""--deterministic-mode on a GPU: bit-identical results in every run of a command on the same devices and versions.

Sources of nondeterminism, and the remedy of each:

    the embedding's gradient (`index_add_`, atomics)     torch's deterministic kernel, which sorts rows first
    attention's backward pass                            deterministic mode of flash-attn-4 and of torch's flash kernels;
                                                         cuDNN's kernel is not used (`config/derive/attention_backend.py`)
    matrix products (cuBLAS, shared work space)          CUBLAS_WORKSPACE_CONFIG
    kernels of our own (`kernels/fused`)                 deterministic: sums over programs are a second pass
    layers of Transformer Engine                         NVTE_ALLOW_NONDETERMINISTIC_ALGO=0; attention is that of `local`
    any other operation                                  torch raises an error

Sources: torch.use_deterministic_algorithms; cuBLAS, "Results Reproducibility".
"""

from __future__ import annotations

import torch

from megatrain.config.environment import set_unless_given

_WORKSPACE = ":4096:8"
"""Eight buffers of 4,096 KiB, the size that torch uses on Hopper by default."""


def use_deterministic_operations() -> None:
    """Make the process deterministic; call it before the first matrix product."""
    set_unless_given("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    set_unless_given("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    torch.use_deterministic_algorithms(mode=True)
    # No kernel reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
