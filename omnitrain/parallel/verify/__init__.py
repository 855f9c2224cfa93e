"""The proof on a tiny model that a layout does not change losses, gradients or weights."""
