"""Implementations of the leaves that layer specs are built from; all have the same canonical names."""
