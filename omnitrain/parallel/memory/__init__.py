"""Recompute, offload of activations, and the allocator's settings."""
