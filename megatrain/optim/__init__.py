"""The optimizer: sharded state, exact norms and clipping, loss scaling, learning-rate schedules."""
