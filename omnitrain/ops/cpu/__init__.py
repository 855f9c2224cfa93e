"""Implementations that are faster only on a CPU."""
