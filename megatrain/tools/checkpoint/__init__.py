"""`megatrain checkpoint`: list, verify, inspect, compare, remove and rewrite checkpoints, without a GPU."""
