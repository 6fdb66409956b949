"""`megatrain parity`: the same model under every layout, against one process."""
