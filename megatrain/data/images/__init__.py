"""Samples with images: rows of conversations, tar shards, pixels, packing."""
