"""Samples, and the packs that are made of them."""
