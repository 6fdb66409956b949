"""The run: facts, process groups, the engine that makes steps, the loop around it, and what it shows."""
