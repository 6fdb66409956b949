"""How a model is spread over ranks: the grid, parameter layouts, flat buffers, and the parallel axes."""
