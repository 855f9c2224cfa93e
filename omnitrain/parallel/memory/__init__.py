"""Activation recompute, activation offload, and available memory."""
