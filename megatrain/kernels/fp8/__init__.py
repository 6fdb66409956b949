"""FP8: casts with a scale, and products of FP8 matrices."""
