"""FP8: casts with a scale, and GEMMs of FP8 matrices."""
