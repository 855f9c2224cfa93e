"""Verify on a tiny model that a layout changes no losses, gradients or weights."""
