"""Operations as plain functions: fused kernels, each with an eager reference."""
