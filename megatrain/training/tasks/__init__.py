"""Scores of downstream tasks by the model that trains."""
