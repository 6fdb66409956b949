"""Subjects of runs that begin from a trained model."""
