"""`megatrain plan`: the best layout for given costs."""
