"""Parsers of settings, and the data that they return."""
