"""Dry runs and memory plans: a run computed without a GPU."""
