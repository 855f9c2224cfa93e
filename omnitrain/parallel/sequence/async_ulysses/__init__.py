"""Ulysses whose all-to-alls run while the projections of q, k and v are computed."""
