"""Faults of a run and of its hardware: ranks that hang, values that are wrong, ranks that are slow."""
