"""Tensor parallelism of unmodified models: ranks that share every layer's matrices."""
