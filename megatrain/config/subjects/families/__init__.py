"""Families of models: their stacks, and their samples."""
