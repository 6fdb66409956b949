"""Matrix products that overlap the communication of tensor-parallel layers."""
