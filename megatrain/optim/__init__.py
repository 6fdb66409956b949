"""The optimizer: sharded state, exact norms and clipping, learning-rate schedules."""
