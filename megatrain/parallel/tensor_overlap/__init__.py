"""GEMMs that overlap the communication of tensor-parallel layers, and sums of ranks' terms in the order of the ranks."""
