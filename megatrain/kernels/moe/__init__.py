"""Kernels of mixtures of experts: routing, permutation, grouped matrix products."""
