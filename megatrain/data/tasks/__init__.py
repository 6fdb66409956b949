"""Downstream tasks: files of multiple choice and cloze documents, their tokens and their scores."""
