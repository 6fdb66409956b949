"""Derived values, rules and notes, a file per subject."""
