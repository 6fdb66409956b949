"""Attention over context-parallel ranks."""
