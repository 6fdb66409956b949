"""Training runs: start-up, the engine and its step, the loop around it, logging, planning and debugging."""
