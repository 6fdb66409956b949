"""Text generation from a checkpoint: a plain loop, to inspect a trained model."""
