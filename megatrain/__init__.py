"""Pretraining of large language models: see ARCHITECTURE in the docs for the floors, README for the first run."""

__version__ = "0.1.0"
