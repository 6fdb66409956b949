"""Distillation: the teacher of a run, or what it has computed before."""
