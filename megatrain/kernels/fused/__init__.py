"""Triton kernels, each beside its reference in `megatrain/kernels`, which decides by `is_fused` which of the two runs."""
