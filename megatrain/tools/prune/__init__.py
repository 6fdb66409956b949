"""`megatrain prune`: a smaller model of the parts that matter most, measured on a calibration set."""
