"""Attention kernels that return the log-sum-exp: interface, library backends, eager reference."""
