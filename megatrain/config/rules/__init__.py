"""Validation rules: one small function per rule, each returning the problems it finds."""
