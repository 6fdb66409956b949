"""--deterministic-mode on a GPU: the same bits in every run of the same command on the same devices and versions.

What could differ, and what is done about it:

    the embedding's gradient (`index_add_`, atomics)     torch's other way: rows are sorted first
    attention's backward pass                            flash-attn-4 and torch's flash kernels order their sums when asked;
                                                         cuDNN's is not taken (`config/derive/attention_backend.py`)
    matrix products (cuBLAS, which shares work space)    CUBLAS_WORKSPACE_CONFIG
    kernels of our own (`kernels/fused`)                 sums over programs are a second pass: there is nothing to do
    an operation that nobody thought of                  torch refuses it

Sources: torch.use_deterministic_algorithms; cuBLAS, "Results Reproducibility".
"""

from __future__ import annotations

import torch

from megatrain.config.environment import set_unless_given

_WORKSPACE = ":4096:8"
"""Eight buffers of 4,096 KiB: as much as torch gives cuBLAS on Hopper anyway."""


def use_deterministic_operations() -> None:
    """For the whole process, before its first matrix product."""
    set_unless_given("CUBLAS_WORKSPACE_CONFIG", _WORKSPACE)
    torch.use_deterministic_algorithms(mode=True)
    # All that is read was written before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
