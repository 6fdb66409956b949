"""Liveness of ranks: failures and their root cause, late ranks, and the watch that connects all ranks with rank 0."""
