"""Scaling ladders: families of small runs, and the law of their losses."""
