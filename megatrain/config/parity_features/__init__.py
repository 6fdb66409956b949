"""The features that `megatrain parity` verifies, and the combinations that are refused."""
