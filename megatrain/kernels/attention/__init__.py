"""Attention kernels that return the log-sum-exp, and their eager reference."""
