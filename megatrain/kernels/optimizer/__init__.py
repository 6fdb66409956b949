"""Optimizer kernels over flat shards."""
