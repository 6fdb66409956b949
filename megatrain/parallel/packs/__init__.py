"""Micro-batches of whole documents, each on as many context ranks as it needs."""
