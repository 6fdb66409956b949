"""Derived values, each computed once, with its reason; table.py has their order."""
