"""Mixture-of-experts kernels: routing, permutation, grouped GEMM."""
