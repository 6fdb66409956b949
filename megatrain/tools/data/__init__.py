"""`megatrain data`: inspect, sample, index and merge datasets."""
