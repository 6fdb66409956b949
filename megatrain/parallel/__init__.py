"""Parallelism: the rank grid, parameter layouts, flat buffers, collectives, and one file per parallel axis."""
