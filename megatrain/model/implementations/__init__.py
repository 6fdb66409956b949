"""Implementations of the modules that layer specs are built from; all have the same canonical names."""
