"""FP8 in tensor-parallel linear layers: scales, their history, GEMMs."""
