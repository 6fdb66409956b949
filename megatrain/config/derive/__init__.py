"""Derived values: each computed once, with its reason."""
