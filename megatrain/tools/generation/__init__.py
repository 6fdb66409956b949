"""`megatrain generate` and `megatrain serve`: text from a checkpoint."""
