"""`megatrain doctor`: checks of a machine before a run."""
