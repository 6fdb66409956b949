"""Experts: router, dispatch, the experts of a rank, the shared expert."""
