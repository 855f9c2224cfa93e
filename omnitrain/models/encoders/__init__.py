"""Encoders: HF towers with a projector into the foundation."""
