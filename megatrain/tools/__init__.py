"""The `megatrain` command."""
