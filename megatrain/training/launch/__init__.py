"""Launching: facts, one plan for all ranks, process groups, and how a rank's failure ends the others."""
