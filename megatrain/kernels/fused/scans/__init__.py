"""Fused kernels of layers with a state in place of keys and values: Mamba-2, the gated delta rule, their convolution."""
