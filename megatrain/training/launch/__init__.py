"""Start of a run: facts, one plan for all ranks, process groups."""
