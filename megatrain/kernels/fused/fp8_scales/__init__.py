"""Casts to FP8 with more than one scale per tensor, in Triton."""
