"""GEMMs that overlap the communication of tensor-parallel layers."""
