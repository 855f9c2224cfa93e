"""Async Ulysses: overlap the all-to-alls of q, k and v with their projections."""
