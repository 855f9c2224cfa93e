"""Run the foundation over a pack: whole, as a slice of the sequence, or by its own forward."""
