"""Tensor parallelism of unmodified models: ranks share the matrices of every layer."""
