"""Samples and micro-batches: from indexed datasets to the batches of a step."""
