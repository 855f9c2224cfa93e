"""Sequence parallelism: Ulysses, ring attention, and their exchanges."""
