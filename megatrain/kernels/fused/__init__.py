"""Triton kernels. The module of the same name in `megatrain/kernels` has the reference, and selects one of them by `is_fused`."""
