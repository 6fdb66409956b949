"""Megatron-LM's flags: accepted, renamed or refused, and where defaults differ."""
