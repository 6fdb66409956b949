"""Text from a trained model: a plain loop, for looking at what training made."""
