"""Encoders: HF towers with a projector to the foundation's hidden size."""
