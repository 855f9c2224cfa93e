"""The run of the foundation over a pack: whole, as a slice of a sequence, or by its own forward."""
