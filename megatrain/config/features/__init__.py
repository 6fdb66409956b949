"""The table of features that `megatrain parity` proves."""
