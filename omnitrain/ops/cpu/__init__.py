"""Kernels that are faster on a CPU alone."""
