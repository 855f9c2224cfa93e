"""Held-out loss and generation during training, and their files."""
